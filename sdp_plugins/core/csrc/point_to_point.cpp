#include "point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace sdp {
namespace {
constexpr double kDriveS = 0.05;  // interval at which a caller checks signals and its time-out
constexpr int kSpins = 200;       // rounds without progress before sleeping: a peer may be copying

bool plausible(std::uint64_t nbytes, DType dtype) {
  const std::size_t item = itemsize(dtype);  // 0: no such type
  return item > 0 && nbytes % item == 0 && nbytes <= std::numeric_limits<std::int64_t>::max();
}

// While a caller polls for messages itself, the bell wakes no thread.
class Polling {
 public:
  explicit Polling(FutexCounter& bell) : bell_(bell) { bell_.muted.fetch_add(1); }
  ~Polling() { bell_.muted.fetch_sub(1); }
  Polling(const Polling&) = delete;
  Polling& operator=(const Polling&) = delete;

 private:
  FutexCounter& bell_;
};
}  // namespace

PointToPoint::PointToPoint(std::shared_ptr<Communicator> communicator, int spin_us)
    : communicator_(std::move(communicator)),
      spin_(SpinPolicy::of_callers(spin_us, communicator_->oversubscribed())),
      rings_(communicator_->peers(), communicator_->rank()),
      sends_(static_cast<std::size_t>(communicator_->world_size())),
      incoming_(static_cast<std::size_t>(communicator_->world_size())),
      others_left_(!communicator_->peers().are_a_part()) {
  bell().muted.store(1);  // no message is pending
}

PointToPoint::~PointToPoint() {
  close();
}

std::shared_ptr<Work> PointToPoint::submit(Request request) {
  request.validate(communicator_->rank(), communicator_->world_size());
  communicator_->throw_if_failed();  // first: in a forked child the lock may be held forever
  auto work = std::make_shared<Work>([self = weak_from_this()](const Work& waited) {
    if (const auto alive = self.lock()) alive->drive(waited);
  });
  const int peer = request.peer;
  {
    const std::lock_guard lock(mutex_);
    try {
      post(std::move(request), work);
    } catch (const Failure& failure) {
      throw fail_all(failure);  // no bytes may move after the caller knows of the failure
    }
  }
  // A waiting thread moves the rest, or the background thread does when the peer rings.
  advance([&] { return peer < 0 ? progress() : progress_with(peer); });
  return work;
}

void PointToPoint::post(Request request, const std::shared_ptr<Work>& work) {
  communicator_->throw_if_failed();  // with the lock held: a failure may leave rings inconsistent
  if (!thread_.started()) thread_.start([this] { loop(); }, "sdp-p2p");
  const std::uint64_t seq = request.seq != 0 ? request.seq : ++seq_;
  OperationRecord record(communicator_->flight(), communicator_->trace(), request, seq, work.get());
  if (request.peer >= 0) record.event.peer = communicator_->peers().id(request.peer);
  record.issue();
  PendingMessage pending{std::move(request), work, record};
  if (pending_++ == 0) bell().muted.fetch_sub(1);
  // Before the first look at the rings: it sees what a peer wrote that found the bell muted.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (pending.request.op == Op::send) {
    sends_[static_cast<std::size_t>(pending.request.peer)].push_back(std::move(pending));
  } else {
    post_receive(std::move(pending));
  }
}

// Moves bytes while the peers are quick, as a collective's caller does. Then leaves the rest to the
// background thread, which also checks the peers and the deadlines.
void PointToPoint::drive(const Work& work) {
  FutexCounter& bell = this->bell();
  const double end_s = now_s() + kDriveS;
  std::uint32_t seen = 0;
  for (const Polling polling(bell); true;) {
    seen = bell.value.load(std::memory_order_acquire);
    const bool moved = advance([this] { return progress(); });
    if (work.completed() || now_s() > end_s) break;
    if (!moved && !spin_until(bell, seen + 1, spin_)) break;
  }
  // Peers that rang meanwhile have woken no thread.
  if (!work.completed() || (bell.muted.load() == 0 && bell.value.load() != seen)) bell.alarm();
}

// Runs one step with the lock held; returns whether it moved bytes. A failure of the step fails all
// messages of the group before another step can run.
bool PointToPoint::advance(const std::function<bool()>& step) {
  const std::lock_guard lock(mutex_);
  try {
    return step();
  } catch (const Failure& failure) {
    (void)fail_all(failure);
  } catch (const std::exception& error) {
    (void)fail_all(communicator_->unexpected(error).in("send or recv"));
  }
  return false;
}

std::optional<EventRing::Ticket> PointToPoint::take_back(const Work& work) {
  const std::lock_guard lock(mutex_);
  const auto ticket = matching_.take_back(work);
  if (ticket) one_fewer_pending();
  return ticket;
}

void PointToPoint::others_have_left() {
  const std::lock_guard lock(mutex_);
  others_left_ = true;
}

void PointToPoint::post_receive(PendingMessage receive) {
  if (const auto message = matching_.take_unexpected(receive)) return deliver(receive, *message);
  matching_.post(std::move(receive));
}

void PointToPoint::finish(PendingMessage& pending, const std::optional<Failure>& failure,
                          int source) {
  if (source >= 0) source = pending.record.event.peer = communicator_->peers().id(source);
  if (failure) pending.record.begin();  // if it has not: traces show failed messages
  pending.record.end(failure ? &*failure : nullptr);
  pending.work->finish(failure, source);
  one_fewer_pending();
}

// A message is no longer pending. Peers need not wake the background thread when none is.
void PointToPoint::one_fewer_pending() {
  if (--pending_ == 0) bell().muted.fetch_add(1);
}

void PointToPoint::close() {
  communicator_->close();
  if (!thread_.ours()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  bell().alarm();
  thread_.join();
}

void PointToPoint::loop() {
  FutexCounter& bell = this->bell();
  int idle = 0;
  double watch_s = now_s() + 1e-6 * kMessagePeerCheckUs;
  while (true) {
    const std::uint32_t seen = bell.value.load(std::memory_order_acquire);
    bool stopped = false;
    const bool moved = advance([&] {
      stopped = stopping_;
      const double now = now_s();
      const bool watches = idle > kSpins || now > watch_s;
      if (watches) watch_s = now + 1e-6 * kMessagePeerCheckUs;
      if (stopping_ || watches) communicator_->throw_if_failed();
      // Determine gone ranks before the progress, which still takes the messages that they sent.
      auto gone = watches ? communicator_->peers().gone() : std::map<int, Failure>{};
      const bool any = progress();
      if (any) gone.clear();  // there may be more of their messages
      if (watches) check_waiting(gone);
      return any;
    });
    if (stopped) return;  // the group is closed, and its messages have failed
    idle = moved ? 0 : idle + 1;
    // Sleep if no message is pending, or if a polling caller moves the bytes.
    const bool muted = bell.muted.load(std::memory_order_relaxed) != 0;
    if (muted || idle > kSpins) bell.sleep(seen, kMessagePeerCheckUs);
  }
}

bool PointToPoint::progress() {
  bool moved = false;
  for (int r = 0; r < communicator_->world_size(); ++r) {
    if (r != communicator_->rank()) moved = progress_with(r) || moved;
  }
  return moved;
}

bool PointToPoint::progress_with(int peer) {
  const bool sent = progress_send(peer);
  return progress_recv(peer) || sent;
}

bool PointToPoint::progress_send(int dst) {
  auto& queue = sends_[static_cast<std::size_t>(dst)];
  bool moved = false;
  while (!queue.empty()) {
    PendingMessage& send = queue.front();
    const Piece& piece = send.request.sends[0];
    const Envelope envelope{piece.count * itemsize(send.request.dtype), send.request.tag,
                            send.request.dtype};
    if (send.moved < sizeof envelope) {  // a full ring may have taken a part of the envelope
      const std::size_t n =
          rings_.write(dst, reinterpret_cast<const std::byte*>(&envelope) + send.moved,
                       sizeof envelope - send.moved);
      if (n > 0) send.record.begin();
      send.moved += n;
      moved = moved || n > 0;
      if (send.moved < sizeof envelope) return moved;
    }
    const std::uint64_t done = send.moved - sizeof envelope;
    const std::size_t n = rings_.write(dst, piece.data + done, envelope.nbytes - done);
    send.moved += n;
    moved = moved || n > 0;
    if (done + n < envelope.nbytes) return moved;
    PendingMessage done_now = std::move(send);
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
    const std::uint64_t left = incoming.envelope.nbytes - incoming.moved;
    const std::size_t here = std::min<std::uint64_t>(left, rings_.readable(src));
    // Allocate for received bytes only: the announced size is not trusted.
    if (incoming.target == nullptr) incoming.aside.resize(incoming.moved + here);
    std::byte* to =
        incoming.target != nullptr ? incoming.target->request.recvs[0].data : incoming.aside.data();
    const std::size_t n = rings_.read(src, to + incoming.moved, here);
    incoming.moved += n;
    moved = moved || n > 0;
    if (incoming.moved < incoming.envelope.nbytes) return moved;
    finish_message(src);
    moved = true;
  }
  return moved;
}

// Opens the next message of `src`, if its envelope has arrived and a receive waits for `src`. Else
// the message stays in the ring, which limits its sender. A message is kept as unexpected only if a
// receive for a later message waits.
bool PointToPoint::begin_message(int src) {
  Envelope envelope;
  if (rings_.readable(src) < sizeof envelope || !matching_.wants(src)) return false;
  rings_.read(src, reinterpret_cast<std::byte*>(&envelope), sizeof envelope);
  if (!plausible(envelope.nbytes, envelope.dtype)) {
    throw communicator_->peers().blame(FailureKind::mismatch, src, " sent a malformed message");
  }
  PendingMessage* const target = matching_.match(src, envelope.tag);
  if (target != nullptr) {
    check_size(*target, src, envelope);
    target->record.begin();
  }
  incoming_[static_cast<std::size_t>(src)] = Incoming{true, envelope, 0, target, {}};
  return true;
}

void PointToPoint::check_size(const PendingMessage& receive, int src,
                              const Envelope& envelope) const {
  const std::uint64_t room = receive.request.recvs[0].count * itemsize(receive.request.dtype);
  if (envelope.nbytes == room && envelope.dtype == receive.request.dtype) return;
  const std::uint64_t count = envelope.nbytes / std::max<std::size_t>(1, itemsize(envelope.dtype));
  const std::string sent = std::string(name(envelope.dtype)) + "[" + std::to_string(count) + "]";
  fail(receive, communicator_->peers().blame(FailureKind::mismatch, src, " sends " + sent,
                                             Hint::other_message));
}

void PointToPoint::finish_message(int src) {
  Incoming message = std::exchange(incoming_[static_cast<std::size_t>(src)], Incoming{});
  if (message.target != nullptr) {
    PendingMessage receive = matching_.remove(*message.target);
    finish(receive, std::nullopt, src);
    return;
  }
  UnexpectedMessage aside{src, message.envelope, std::move(message.aside)};
  // A receive may have been posted while the message was being set aside.
  if (PendingMessage* const receive = matching_.match(src, message.envelope.tag)) {
    deliver(*receive, aside);
    matching_.remove(*receive);
  } else {
    matching_.keep(std::move(aside));
  }
}

// Completes a receive from an unexpected message.
void PointToPoint::deliver(PendingMessage& receive, const UnexpectedMessage& message) {
  check_size(receive, message.source, message.envelope);
  if (!message.bytes.empty()) {
    std::memcpy(receive.request.recvs[0].data, message.bytes.data(), message.bytes.size());
  }
  receive.record.begin();
  finish(receive, std::nullopt, message.source);
}

void PointToPoint::check_waiting(const std::map<int, Failure>& gone) const {
  for (const auto& queue : sends_) {
    if (!queue.empty()) check_one(queue.front(), gone);
  }
  for (const PendingMessage& receive : matching_.posted()) check_one(receive, gone);
}

// A receive from any rank fails with the first lost rank, which might have been the sender. Ranks
// that close normally have sent all their messages, so the receive fails only when all ranks are
// gone. Ranks of other nodes may still send until others_have_left is called.
void PointToPoint::check_one(const PendingMessage& pending,
                             const std::map<int, Failure>& gone) const {
  const int peer = pending.request.peer;
  const bool all_gone = others_left_ && gone.size() + 1 == sends_.size();
  for (const auto& [rank, why] : gone) {
    const bool any =
        peer < 0 && (all_gone || communicator_->peers().state(rank) != PeerState::left);
    if (any || peer == rank) fail(pending, why);
  }
  // If ranks of other nodes may send, the thread that receives from them checks the deadline.
  const bool ours = peer >= 0 || others_left_;
  if (ours && now_s() - pending.record.issued_s() > pending.request.timeout_s) {
    std::vector<int> blamed;
    for (int r = 0; r < communicator_->world_size(); ++r) {
      const bool any = peer < 0 && r != communicator_->rank() && !gone.contains(r);
      if (any || r == peer) blamed.push_back(communicator_->peers().id(r));
    }
    const std::string who = communicator_->names().list(blamed);
    const std::string silent =
        blamed.size() == 1 ? who + " did not answer in " : "none of " + who + " answered in ";
    fail(pending, {FailureKind::timeout, silent + seconds(pending.request.timeout_s), blamed,
                   Hint::late_rank});
  }
}

void PointToPoint::fail(const PendingMessage& pending, Failure failure) const {
  throw failure.in(pending.request.signature(pending.record.event.seq), {},
                   now_s() - pending.record.issued_s());
}

// Called with the lock held. Fails all messages with the group's first cause and returns it.
Failure PointToPoint::fail_all(const Failure& why) {
  const Failure failure = communicator_->fail(why);
  for (auto& queue : sends_) {
    for (PendingMessage& send : queue) finish(send, failure, -1);
    queue.clear();
  }
  for (PendingMessage& receive : matching_.remove_all()) finish(receive, failure, -1);
  for (Incoming& incoming : incoming_) incoming = Incoming{};
  return failure;
}
}  // namespace sdp
