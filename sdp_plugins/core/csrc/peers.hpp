// The other ranks of a group on this node: their segments, and whether they still live.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "error.hpp"
#include "handles.hpp"
#include "rank_names.hpp"
#include "segment.hpp"

namespace sdp {

// File descriptors from the rendezvous, one per rank. `Peers` owns them from its constructor on.
struct Links {
  int rank = 0;
  int world_size = 1;
  std::vector<int> segment_fds;
  std::vector<int> sockets;  // connected Unix sockets; -1 at this rank's own index
  std::vector<int> pidfds;   // -1 where the kernel could not give one
  // These ranks' places in the group, where they are one node's share of a larger one; else empty.
  std::vector<int> ids = {};
  int group_size = 0;
  std::uint64_t token = 0;  // of the group, for those who report its failures
  RankNames names = RankNames();
};

class Peers {
 public:
  Peers(Links links, std::size_t staging_bytes);
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // Whether these are one node's share of a larger group.
  bool are_a_part() const { return world_size_ < group_size_; }
  int id(int rank) const { return ids_[static_cast<std::size_t>(rank)]; }  // in the whole group
  std::vector<int> ids(const std::vector<int>& ranks) const;
  const RankNames& names() const { return names_; }  // of ids
  std::string error_prefix() const;                  // "[rank 3/8] ", how every message begins
  void set_error_prefix(std::string text);
  const Layout& layout() const { return layout_; }
  const Segment& segment(int rank) const { return segments_[static_cast<std::size_t>(rank)]; }
  const Segment& own() const { return segment(rank_); }
  std::uint64_t token() const { return token_; }
  int socket(int rank) const { return sockets_[static_cast<std::size_t>(rank)].get(); }

  // Ranks whose process has ended, by their place here. In failures ranks have their ids. One poll,
  // no waiting.
  std::vector<int> dead() const;
  // Why `rank` cannot make progress any more though its process may live; nothing if it can. Where
  // it repeats the failure of another rank, the origin is that one.
  std::optional<Failure> gave_up(int rank) const;
  Failure ended(const std::vector<int>& ids) const;  // what the end of these processes means
  // The failure with its text, as this rank words it.
  Failure composed(Failure failure) const;
  bool left(int rank) const;        // closed the group in good order
  bool unreported(int rank) const;  // has said nothing about an end: if it is dead, it died
  bool failed(int rank) const;      // gave up, and not in good order: the whole group is lost
  // `dead` and `gave_up`. What a rank did before it went is visible once it is listed here.
  std::map<int, Failure> gone() const;

  void leave();                        // this rank closes in good order
  void give_up(const Failure& cause);  // tells all peers why; the first cause stays

 private:
  void say(PeerState state);

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
  std::vector<FileDescriptor> files_;  // of some segments, for those who look on from outside
  std::mutex state_mutex_;
};

// Prepares a segment's file: sized and with a header; done by its owner before the rendezvous.
// Returns where in the file `FlightArea::rank_info` is to be written.
std::size_t initialize_segment(int fd, int rank, int world_size, std::size_t staging_bytes);
}  // namespace sdp
