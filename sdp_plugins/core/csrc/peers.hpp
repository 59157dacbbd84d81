// The other ranks of a group on this node: their segments, and whether they are alive.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "error.hpp"
#include "raii.hpp"
#include "rank_names.hpp"
#include "segment.hpp"

namespace sdp {

// How often a wait for all ranks checks that their processes are alive: a lost one is noticed
// within this time.
constexpr std::uint32_t kPeerCheckUs = 25'000;
// The same for a thread that waits for messages. It checks all peers, not those it needs.
constexpr std::uint32_t kMessagePeerCheckUs = 100'000;

// The longest that a rank which gives up waits for its peers to leave its memory.
constexpr double kAccessS = 10;

// File descriptors from the rendezvous, one per rank. The constructor of `Peers` takes ownership.
struct Links {
  int rank = 0;
  int world_size = 1;
  std::vector<int> segment_fds;
  std::vector<int> sockets;  // connected Unix sockets; -1 at this rank's own index
  std::vector<int> pidfds;   // -1 if the kernel could not provide one
  // The ranks' numbers in a group across nodes of which they are one node's share; else empty.
  std::vector<int> ids = {};
  int group_size = 0;
  std::uint64_t token = 0;  // of the group, for reports of its failures
  RankNames names = RankNames();
};

class Peers {
 public:
  Peers(Links links, std::size_t staging_bytes);
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // Whether these ranks are one node's share of a larger group.
  bool are_a_part() const { return world_size_ < group_size_; }
  int id(int rank) const { return ids_[static_cast<std::size_t>(rank)]; }  // in the whole group
  std::vector<int> ids(const std::vector<int>& ranks) const;
  const RankNames& names() const { return names_; }  // of ids
  std::string error_prefix() const;                  // "[rank 3/8] ", begins every message
  void set_error_prefix(std::string text);
  const Layout& layout() const { return layout_; }
  const Segment& segment(int rank) const { return segments_[static_cast<std::size_t>(rank)]; }
  const Segment& own() const { return segment(rank_); }
  std::uint64_t token() const { return token_; }
  int socket(int rank) const { return sockets_[static_cast<std::size_t>(rank)].get(); }

  // Ranks whose process has ended, by their number on this node (failures have ids instead). One
  // poll, no waiting.
  std::vector<int> dead() const;
  // Why `rank` cannot make progress any more although its process may be alive; nullopt if it can.
  // If `rank` repeats the failure of another rank, the origin is the other rank.
  std::optional<Failure> gave_up(int rank) const;
  Failure ended(const std::vector<int>& ranks) const;  // these ranks' processes have ended
  // A failure that blames this rank: `did` follows its name.
  Failure blame(FailureKind kind, int rank, const std::string& did, Hint hint = Hint::none) const;
  // The failure with its text as composed by this rank.
  Failure composed(Failure failure) const;
  // Runs `body`, whose failures happen in an operation beyond `Op`, and composes them.
  template <class Body>
  auto in(std::string_view operation_name, const Body& body) const {
    try {
      return body();
    } catch (Failure& failure) {
      throw composed(failure.in(operation_name));
    }
  }
  // `left`: has closed the group normally. `failed`: has given up after a failure, so that the
  // whole group is unusable.
  PeerState state(int rank) const {
    return segment(rank).header().state.load(std::memory_order_acquire);
  }
  // Dead ranks that have neither left nor failed, so that they have crashed.
  std::vector<int> crashed() const;
  // `crashed` and `gave_up` together. Everything that a rank wrote before it ended is visible once
  // it is listed here.
  std::map<int, Failure> gone() const;

  // Returns when no peer accesses this rank's registered memory. Called after `leave` or `give_up`:
  // no access can begin then. Returns at the latest `kAccessS` after those, as a peer may be
  // stopped.
  void await_access() const;

  void leave();                        // closes this rank normally
  void give_up(const Failure& cause);  // tells all peers the cause; the first cause stays

 private:
  void set_state(PeerState state);

  int rank_, world_size_;
  std::vector<int> ids_;
  int group_size_;
  std::uint64_t token_;
  RankNames names_;
  mutable std::mutex error_prefix_mutex_;
  std::string error_prefix_;
  Layout layout_;
  std::vector<Segment> segments_;
  std::vector<FileDescriptor> sockets_, pidfds_;
  std::vector<FileDescriptor> files_;  // of some segments, for readers outside of the group
  std::mutex state_mutex_;
  std::atomic<double> access_end_s_ = 0;  // 0: this rank has neither left nor given up
};

// While it exists, this rank accesses its peers' registered memory.
class PeerMemoryAccess {
 public:
  explicit PeerMemoryAccess(const Peers& peers) : flag_(peers.own().header().in_peer_memory) {
    flag_.store(1, std::memory_order_relaxed);
    // Either this rank sees next that a peer has given up, or that peer sees the flag and waits.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  ~PeerMemoryAccess() { flag_.store(0, std::memory_order_release); }
  PeerMemoryAccess(const PeerMemoryAccess&) = delete;
  PeerMemoryAccess& operator=(const PeerMemoryAccess&) = delete;

 private:
  std::atomic<std::uint32_t>& flag_;
};

// Sizes a segment's file and writes its header; called by its owner before the rendezvous. Returns
// the offset of `FlightArea::rank_info` in the file.
std::size_t initialize_segment(int fd, int rank, int world_size, std::size_t staging_bytes,
                               const std::string& error_prefix = "");
}  // namespace sdp
