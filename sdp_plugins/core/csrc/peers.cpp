#include "peers.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "clock.hpp"

namespace sdp {
namespace {
// This rank keeps its own file and those of the next ranks open, so that the flight recorder of a
// rank that has died can be read through any of them. The files of all ranks would be too many.
constexpr int kFilesKept = 8;
}  // namespace

std::size_t initialize_segment(int fd, int rank, int world_size, std::size_t staging_bytes,
                               const std::string& error_prefix) try {
  const Layout layout(world_size, staging_bytes);
  if (ftruncate(fd, static_cast<off_t>(layout.total())) != 0) {
    throw shared_memory_failure("cannot size a memory file to " + std::to_string(layout.total()) +
                                " bytes");
  }
  const Mapping mapping(fd, sizeof(Header), 0, false);
  auto* header = reinterpret_cast<Header*>(mapping.data());  // the file is zero-filled
  header->magic = kMagic;
  header->rank = rank;
  header->world_size = world_size;
  header->staging_bytes = staging_bytes;
  header->flight_at = layout.flight();
  return layout.flight();
} catch (Failure& failure) {
  throw failure.in("rendezvous").compose(error_prefix, RankNames(), rank);
}

Peers::Peers(Links links, std::size_t staging_bytes)
    : rank_(links.rank),
      world_size_(links.world_size),
      ids_(std::move(links.ids)),
      group_size_(links.group_size),
      token_(links.token),
      names_(std::move(links.names)),
      layout_(world_size_, staging_bytes) {
  if (ids_.empty()) {
    ids_.resize(static_cast<std::size_t>(world_size_));
    std::iota(ids_.begin(), ids_.end(), 0);
    group_size_ = world_size_;
  }
  error_prefix_ = "[rank " + std::to_string(id(rank_)) + "/" + std::to_string(group_size_) + "] ";
  // Take ownership of all descriptors first, so that none leaks if a mapping fails.
  std::vector<FileDescriptor> files;
  for (int fd : links.segment_fds) files.emplace_back(fd);
  for (int fd : links.sockets) sockets_.emplace_back(fd);
  for (int fd : links.pidfds) pidfds_.emplace_back(fd);
  in("rendezvous", [&] {
    for (int r = 0; r < world_size_; ++r) {
      const int file = files[static_cast<std::size_t>(r)].get();
      // Map the header first: with another layout the file may be shorter than this layout.
      const Mapping start(file, sizeof(Header), 0, false);
      const auto& header = *reinterpret_cast<const Header*>(start.data());
      if (header.magic != kMagic || header.rank != r || header.world_size != world_size_ ||
          header.staging_bytes != staging_bytes) {
        throw blame(FailureKind::mismatch, r, " has another memory layout", Hint::one_version);
      }
      segments_.emplace_back(Mapping(file, layout_.total(), 0, false), &layout_);
    }
  });
  for (int next = 0; next < std::min(kFilesKept, world_size_); ++next) {
    const auto r = static_cast<std::size_t>((rank_ + next) % world_size_);
    files_.push_back(std::move(files[r]));
  }
}

std::vector<int> Peers::ids(const std::vector<int>& ranks) const {
  std::vector<int> found;
  found.reserve(ranks.size());
  for (int r : ranks) found.push_back(id(r));
  return found;
}

std::string Peers::error_prefix() const {
  const std::lock_guard lock(error_prefix_mutex_);
  return error_prefix_;
}

void Peers::set_error_prefix(std::string text) {
  const std::lock_guard lock(error_prefix_mutex_);
  error_prefix_ = std::move(text);
}

std::vector<int> Peers::dead() const {
  std::vector<pollfd> polled;
  std::vector<int> owner;
  for (int r = 0; r < world_size_; ++r) {
    const auto at = static_cast<std::size_t>(r);
    // A pidfd reports the end of the process itself; children may hold its socket open.
    if (pidfds_[at].get() >= 0) {
      polled.push_back({pidfds_[at].get(), POLLIN, 0});
    } else if (sockets_[at].get() >= 0) {
      polled.push_back({sockets_[at].get(), POLLRDHUP, 0});
    } else {
      continue;
    }
    owner.push_back(r);
  }
  std::vector<int> ended;
  if (poll(polled.data(), polled.size(), 0) <= 0) return ended;
  for (std::size_t i = 0; i < polled.size(); ++i) {
    if ((polled[i].revents & (POLLIN | POLLHUP | POLLRDHUP | POLLERR)) != 0)
      ended.push_back(owner[i]);
  }
  return ended;
}

std::optional<Failure> Peers::gave_up(int rank) const {
  const PeerState why = state(rank);
  if (why == PeerState::open) return std::nullopt;
  if (why == PeerState::left) {
    return blame(FailureKind::peer_lost, rank, " has closed the group while it was needed",
                 default_hint(FailureKind::peer_lost));
  }
  return segment(rank).header().failure.repeated(id(rank), id(rank_), group_size_);
}

Failure Peers::ended(const std::vector<int>& ranks) const {
  return {FailureKind::peer_lost, names_.list(ids(ranks)) + " ended unexpectedly", ids(ranks),
          default_hint(FailureKind::peer_lost)};
}

Failure Peers::blame(FailureKind kind, int rank, const std::string& did, Hint hint) const {
  return {kind, names_.list({id(rank)}) + did, {id(rank)}, hint};
}

Failure Peers::composed(Failure failure) const {
  return failure.compose(error_prefix(), names_, id(rank_));
}

std::vector<int> Peers::crashed() const {
  std::vector<int> ranks = dead();
  std::erase_if(ranks, [&](int r) { return state(r) != PeerState::open; });
  return ranks;
}

std::map<int, Failure> Peers::gone() const {
  std::map<int, Failure> why;
  for (int r : crashed()) why.try_emplace(r, ended({r}));
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    if (const auto cause = gave_up(r)) why.try_emplace(r, *cause);
  }
  return why;
}

void Peers::set_state(PeerState state) {
  if (access_end_s_.load() == 0) access_end_s_.store(now_s() + kAccessS);
  Header& header = own().header();
  header.state.store(state, std::memory_order_release);
  header.step.wake();
  // Threads that poll for messages do not check the state; the sleeping thread does, so wake it.
  for (int r = 0; r < world_size_; ++r) segment(r).header().bell.alarm();
}

void Peers::await_access() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see PeerMemoryAccess
  for (int r = 0; r < world_size_; ++r) {
    const auto accesses = [&] {
      return segment(r).header().in_peer_memory.load(std::memory_order_acquire) == 1;
    };
    while (r != rank_ && accesses() && now_s() < access_end_s_.load()) {
      const std::vector<int> ended = dead();
      if (std::find(ended.begin(), ended.end(), r) != ended.end()) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

void Peers::leave() {
  const std::lock_guard lock(state_mutex_);
  if (own().header().state.load() == PeerState::open) set_state(PeerState::left);
}

void Peers::give_up(const Failure& cause) {
  const std::lock_guard lock(state_mutex_);
  Header& header = own().header();
  if (header.state.load() == PeerState::failed) return;
  header.failure.set(cause, names_, id(rank_));
  set_state(PeerState::failed);
}
}  // namespace sdp
