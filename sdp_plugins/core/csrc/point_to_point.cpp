#include "point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sdp {
namespace {
constexpr std::uint32_t kSliceUs = 100'000;
constexpr int kSpins = 200;  // rounds without progress before sleeping: a peer may just be copying

bool plausible(std::uint64_t nbytes, DType dtype) {
  const std::size_t item = itemsize(dtype);  // 0: no such type
  return item > 0 && nbytes % item == 0 && nbytes <= std::numeric_limits<std::int64_t>::max();
}

// The peer moves one of the two counters, and may have moved it anywhere.
std::size_t ring_used(std::uint64_t head, std::uint64_t tail, const Peers& peers, int peer) {
  const std::uint64_t used = head - tail;
  if (used <= kRingBytes) return used;
  const std::vector<int> blamed{peers.id(peer)};
  throw Failure(FailureKind::mismatch,
                rank_list(blamed) + " has put the channel to this rank out of order", blamed);
}

// The first bytes of a traced message move now.
template <class Message>
void begin(Message& message) {
  if (message.request.issued_ns != 0 && message.moving_ns == 0) message.moving_ns = now_ns();
}

bool accepts(const Request& recv, int src, std::uint32_t tag) {
  return (recv.peer < 0 || recv.peer == src) && recv.tag == tag;
}
}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)),
      sends_(static_cast<std::size_t>(communicator_->world_size())),
      incoming_(static_cast<std::size_t>(communicator_->world_size())) {}

PointToPoint::~PointToPoint() {
  close();
}

std::shared_ptr<Work> PointToPoint::submit(Request request) {
  request.validate(communicator_->rank(), communicator_->world_size());
  communicator_->throw_if_failed();
  auto work = std::make_shared<Work>();
  {
    const std::lock_guard lock(mutex_);
    if (stopping_)
      communicator_->throw_if_failed();  // the thread may have looked for the last time
    if (!thread_.started()) thread_.start([this] { loop(); }, "sdp-p2p");
    if (communicator_->trace().on()) request.issued_ns = now_ns();
    Pending pending{std::move(request), work, ++seq_, now_s()};
    if (pending.request.op == Op::send) {
      sends_[static_cast<std::size_t>(pending.request.peer)].push_back(std::move(pending));
    } else {
      post_recv(std::move(pending));
    }
  }
  communicator_->peers().own().header().bell.bump();
  return work;
}

void PointToPoint::post_recv(Pending recv) {
  recvs_.push_back(std::move(recv));
  try {
    if (claim_unexpected(recvs_.back())) recvs_.pop_back();
  } catch (const Failure& failure) {
    recvs_.pop_back();
    throw communicator_->fail(failure);
  }
}

void PointToPoint::finish(const Pending& pending, const std::optional<Failure>& failure,
                          int source) {
  if (pending.request.issued_ns != 0 && communicator_->trace().on()) {
    TraceEvent event = TraceEvent::of(pending.request);
    event.seq = pending.seq;
    event.finished_ns = now_ns();
    event.started_ns = pending.moving_ns != 0 ? pending.moving_ns : event.finished_ns;
    if (source >= 0) event.peer = source;
    if (event.peer >= 0) event.peer = communicator_->peers().id(event.peer);
    if (failure) event.flags |= TraceEvent::kFailed;
    if (failure && !failure->ranks.empty()) event.blamed = failure->ranks[0];
    event.flags |= TraceEvent::kAsync;
    event.thread = this_thread();
    event.waited_ns = pending.work->waiter().since_ns;
    event.waiter = pending.work->waiter().thread;
    communicator_->trace().add(event);
  }
  pending.work->finish(failure, source);
}

void PointToPoint::close() {
  communicator_->close();
  if (!thread_.ours()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  communicator_->peers().own().header().bell.bump();
  thread_.join();
}

void PointToPoint::loop() {
  Signal& bell = communicator_->peers().own().header().bell;
  int idle = 0;
  while (true) {
    const std::uint32_t seen = bell.value.load(std::memory_order_acquire);
    bool moved = false;
    bool waiting = false;
    try {
      const std::lock_guard lock(mutex_);
      if (stopping_ || idle > kSpins) communicator_->throw_if_failed();
      // Who has gone is asked first: what they sent before is still taken.
      const auto gone = idle > kSpins ? communicator_->peers().gone() : std::map<int, Failure>{};
      moved = progress();
      if (!moved && idle > kSpins) check_waiting(gone);
      waiting = !recvs_.empty() || std::any_of(sends_.begin(), sends_.end(),
                                               [](const auto& queue) { return !queue.empty(); });
    } catch (const Failure& failure) {
      const Failure cause = communicator_->fail(failure);
      const std::lock_guard lock(mutex_);
      fail_all(cause);
      if (stopping_) return;
    } catch (const std::exception& error) {
      const Failure cause = communicator_->fail(Failure(FailureKind::aborted, error.what()));
      const std::lock_guard lock(mutex_);
      fail_all(cause);
    }
    idle = moved ? 0 : idle + 1;
    // Without work there is nothing to watch: sleep until somebody rings.
    if (idle > kSpins || !waiting) bell.sleep(seen, waiting ? kSliceUs : 10 * kSliceUs);
  }
}

bool PointToPoint::progress() {
  bool moved = false;
  for (int r = 0; r < communicator_->world_size(); ++r) {
    if (r == communicator_->rank()) continue;
    moved = progress_send(r) || moved;
    moved = progress_recv(r) || moved;
  }
  return moved;
}

bool PointToPoint::progress_send(int dst) {
  auto& queue = sends_[static_cast<std::size_t>(dst)];
  bool moved = false;
  while (!queue.empty()) {
    Pending& send = queue.front();
    const Piece& piece = send.request.sends[0];
    const Frame frame{piece.count * itemsize(send.request.dtype), send.request.tag,
                      send.request.dtype};
    begin(send);
    if (send.moved < sizeof frame) {  // a full ring may have taken a part of it
      const std::size_t n = ring_write(dst, reinterpret_cast<const std::byte*>(&frame) + send.moved,
                                       sizeof frame - send.moved);
      send.moved += n;
      moved = moved || n > 0;
      if (send.moved < sizeof frame) return moved;
    }
    const std::uint64_t done = send.moved - sizeof frame;
    const std::size_t n = ring_write(dst, piece.data + done, frame.nbytes - done);
    send.moved += n;
    moved = moved || n > 0;
    if (done + n < frame.nbytes) return moved;
    const Pending done_now = std::move(send);
    queue.pop_front();
    finish(done_now, std::nullopt, -1);
    moved = true;
  }
  return moved;
}

bool PointToPoint::progress_recv(int src) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(src)];
  bool moved = false;
  while (incoming.open || begin_message(src)) {
    const std::uint64_t left = incoming.frame.nbytes - incoming.moved;
    const std::size_t here = std::min<std::uint64_t>(left, ring_readable(src));
    // Memory for what has come, not for what was announced.
    if (incoming.target == nullptr) incoming.aside.resize(incoming.moved + here);
    std::byte* to =
        incoming.target != nullptr ? incoming.target->request.recvs[0].data : incoming.aside.data();
    const std::size_t n = ring_read(src, to + incoming.moved, here);
    incoming.moved += n;
    moved = moved || n > 0;
    if (incoming.moved < incoming.frame.nbytes) return moved;
    finish_message(src);
    moved = true;
  }
  return moved;
}

// Opens the next message of `src`, if its frame is there and somebody wants it. A message that
// nobody waits for stays in the ring, which holds its sender back; it is set aside only when a
// receive for another message waits behind it.
bool PointToPoint::begin_message(int src) {
  Frame frame;
  if (ring_readable(src) < sizeof frame || recvs_.empty()) return false;
  const bool wanted = std::any_of(recvs_.begin(), recvs_.end(), [&](const Pending& recv) {
    return !recv.matched && (recv.request.peer < 0 || recv.request.peer == src);
  });
  if (!wanted) return false;
  ring_read(src, reinterpret_cast<std::byte*>(&frame), sizeof frame);
  if (!plausible(frame.nbytes, frame.dtype)) {
    const std::vector<int> blamed{communicator_->peers().id(src)};
    throw Failure(FailureKind::mismatch, rank_list(blamed) + " sent a malformed message", blamed);
  }
  Incoming& incoming = incoming_[static_cast<std::size_t>(src)];
  incoming = Incoming{true, frame, 0, match(src, frame), {}};
  return true;
}

PointToPoint::Pending* PointToPoint::match(int src, const Frame& frame) {
  for (Pending& recv : recvs_) {
    if (recv.matched || !accepts(recv.request, src, frame.tag)) continue;
    check_size(recv, src, frame);
    recv.matched = true;
    begin(recv);
    return &recv;
  }
  return nullptr;
}

void PointToPoint::check_size(const Pending& recv, int src, const Frame& frame) const {
  const std::uint64_t room = recv.request.recvs[0].count * itemsize(recv.request.dtype);
  if (frame.nbytes == room && frame.dtype == recv.request.dtype) return;
  const std::vector<int> blamed{communicator_->peers().id(src)};
  fail(recv, FailureKind::mismatch,
       rank_list(blamed) + " sends " + std::string(name(frame.dtype)) + "[" +
           std::to_string(frame.nbytes / std::max<std::size_t>(1, itemsize(frame.dtype))) + "]",
       blamed);
}

void PointToPoint::finish_message(int src) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(src)];
  if (incoming.target != nullptr) {
    deliver(incoming.target, src);
  } else {
    unexpected_.push_back({src, incoming.frame, std::move(incoming.aside)});
    // A receive may have been posted while the message was on its way aside.
    for (auto recv = recvs_.begin(); recv != recvs_.end();) {
      recv = !recv->matched && claim_unexpected(*recv) ? recvs_.erase(recv) : std::next(recv);
    }
  }
  incoming = Incoming{};
}

void PointToPoint::deliver(Pending* recv, int src) {
  const auto at = std::find_if(recvs_.begin(), recvs_.end(),
                               [&](const Pending& pending) { return &pending == recv; });
  const Pending done = std::move(*at);
  recvs_.erase(at);
  finish(done, std::nullopt, src);
}

// Completes a receive from what was set aside; the caller removes it from the list.
bool PointToPoint::claim_unexpected(Pending& recv) {
  for (auto message = unexpected_.begin(); message != unexpected_.end(); ++message) {
    if (!accepts(recv.request, message->source, message->frame.tag)) continue;
    check_size(recv, message->source, message->frame);
    if (!message->bytes.empty()) {
      std::memcpy(recv.request.recvs[0].data, message->bytes.data(), message->bytes.size());
    }
    const int source = message->source;
    unexpected_.erase(message);
    begin(recv);
    finish(recv, std::nullopt, source);
    return true;
  }
  return false;
}

void PointToPoint::check_waiting(const std::map<int, Failure>& gone) const {
  for (const auto& queue : sends_) {
    if (!queue.empty()) check_one(queue.front(), gone);
  }
  for (const Pending& recv : recvs_) check_one(recv, gone);
}

// A receive from any rank fails with the first rank that is lost: it might have been the sender.
// Ranks that leave in good order have sent what they had to, so of these the last one counts.
void PointToPoint::check_one(const Pending& pending, const std::map<int, Failure>& gone) const {
  const int peer = pending.request.peer;
  const bool all_gone = gone.size() + 1 == sends_.size();
  for (const auto& [rank, why] : gone) {
    const bool any = peer < 0 && (all_gone || !communicator_->peers().left(rank));
    if (any || peer == rank) fail(pending, why.kind, why.what(), why.ranks);
  }
  if (now_s() - pending.started_s > pending.request.timeout_s) {
    std::vector<int> blamed;
    if (peer >= 0) blamed.push_back(communicator_->peers().id(peer));
    fail(pending, FailureKind::timeout,
         (blamed.empty() ? std::string("no rank") : rank_list(blamed)) + " did not answer in " +
             seconds(pending.request.timeout_s),
         blamed);
  }
}

void PointToPoint::fail(const Pending& pending, FailureKind kind, const std::string& what,
                        std::vector<int> ranks) const {
  const std::string op(name(pending.request.op));
  throw Failure(kind,
                communicator_->head() + op + " #" + std::to_string(pending.seq) + " " +
                    pending.request.describe() + ": " + what + "." + hint(kind),
                std::move(ranks), op, pending.seq, now_s() - pending.started_s);
}

void PointToPoint::fail_all(const Failure& failure) {
  for (auto& queue : sends_) {
    for (const Pending& send : queue) finish(send, failure, -1);
    queue.clear();
  }
  for (const Pending& recv : recvs_) finish(recv, failure, -1);
  recvs_.clear();
  for (Incoming& incoming : incoming_) incoming = Incoming{};
}

std::size_t PointToPoint::ring_write(int dst, const std::byte* data, std::size_t nbytes) {
  const Segment& own = communicator_->peers().own();
  RingControl& ring = own.ring(dst);
  const std::uint64_t head = ring.head.load(std::memory_order_relaxed);
  const std::size_t used =
      ring_used(head, ring.tail.load(std::memory_order_acquire), communicator_->peers(), dst);
  const std::size_t n = std::min(nbytes, kRingBytes - used);
  if (n == 0) return 0;
  const std::size_t at = head % kRingBytes;
  const std::size_t first = std::min(n, kRingBytes - at);
  std::memcpy(own.ring_data(dst) + at, data, first);
  std::memcpy(own.ring_data(dst), data + first, n - first);
  ring.head.store(head + n, std::memory_order_release);
  communicator_->peers().segment(dst).header().bell.bump();
  return n;
}

std::size_t PointToPoint::ring_readable(int src) const {
  const RingControl& ring = communicator_->peers().segment(src).ring(communicator_->rank());
  return ring_used(ring.head.load(std::memory_order_acquire),
                   ring.tail.load(std::memory_order_relaxed), communicator_->peers(), src);
}

std::size_t PointToPoint::ring_read(int src, std::byte* data, std::size_t nbytes) {
  const Segment& theirs = communicator_->peers().segment(src);
  const int me = communicator_->rank();
  RingControl& ring = theirs.ring(me);
  const std::size_t n = std::min(nbytes, ring_readable(src));
  if (n == 0) return 0;
  const std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  const std::size_t at = tail % kRingBytes;
  const std::size_t first = std::min(n, kRingBytes - at);
  std::memcpy(data, theirs.ring_data(me) + at, first);
  std::memcpy(data + first, theirs.ring_data(me), n - first);
  ring.tail.store(tail + n, std::memory_order_release);
  theirs.header().bell.bump();
  return n;
}
}  // namespace sdp
