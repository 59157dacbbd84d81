// The ranks of a group on one node. Runs one collective at a time, in the same order on all ranks.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "helper_threads.hpp"
#include "memory_regions.hpp"
#include "operation.hpp"
#include "operation_record.hpp"
#include "owner_process.hpp"
#include "peers.hpp"

namespace sdp {

class Communicator {
 public:
  // `threads`: those that share the work of a large operation, with the one that runs it.
  Communicator(Links links, std::size_t staging_bytes, int threads = 1);
  ~Communicator();

  int rank() const { return peers_.rank(); }
  int world_size() const { return peers_.world_size(); }
  Peers& peers() { return peers_; }
  Regions& regions() { return regions_; }

  // Runs a collective; one thread at a time. Throws Failure; the first one stays the group's cause.
  // Begins and ends the operation's record.
  void run(const Request& request, const Patience& patience, OperationRecord& record);
  // Before `run`, of a request that has device flags: returns when this rank's device has reached
  // the operation. Throws Failure, as `run` does.
  void await_device(const Request& request, const Patience& patience, OperationRecord& record);
  // After a failure, or when the group is closed: returns when no peer accesses this rank's memory.
  void await_access();
  Trace& trace() { return trace_; }
  Flight& flight() { return flight_; }

  // Records why the group is unusable, once, and tells the peers. Returns the first cause.
  Failure fail(const Failure& failure);
  Failure closing() const;                                   // for operations of a closed group
  Failure interruption(const OpSignature& operation) const;  // after a signal has ended it
  Failure unexpected(const std::exception& error) const;     // such as bad_alloc
  std::optional<Failure> failure() const;  // why operations throw; a forked child may call this
  void throw_if_failed() const;
  // Throws if a rank of this node has failed or died, even if no operation waits for it yet.
  // `operation`: has waited for another node, or for a device, for `elapsed_s`. `all_are_needed`:
  // throws if one has left, too.
  void check_peers(const OpSignature& operation, const OpSignature& last_completed,
                   double elapsed_s, bool all_are_needed = false);
  void close();  // later operations throw
  bool closed() const { return closed_.load(); }
  bool ours() const { return owner_.is_this(); }  // a forked child must not use the group
  bool oversubscribed() const { return oversubscribed_; }
  Path last_path() const { return last_path_.load(); }

  const RankNames& names() const { return peers_.names(); }
  std::string error_prefix() const { return peers_.error_prefix(); }
  void set_error_prefix(std::string text) { peers_.set_error_prefix(std::move(text)); }
  int id() const { return peers_.id(rank()); }  // this rank's number in failures

  // Lets all peers map memory of this process, which lies in this file.
  std::uint64_t add_region(std::byte* data, std::uint64_t nbytes, int fd,
                           std::uint64_t file_offset);
  // Memory of this process that all peers can map, zero-filled; freed with the group. `with_view`
  // gives this process and those that map it a view of it, too, that keeps their writes to itself.
  struct Shared {
    std::byte* data;
    std::byte* view;  // null without
    std::uint64_t region;
  };
  Shared allocate(std::size_t nbytes, bool with_view = false);
  void release(std::uint64_t region);

 private:
  Failure repeat_of_cause() const;  // with the lock held

  Peers peers_;
  Regions regions_;
  HelperThreads helpers_;
  const OwnerProcess owner_;
  bool oversubscribed_;  // the node has more ranks than cores that this process may use
  std::uint64_t seq_ = 0;
  std::uint32_t step_ = 0;
  OpSignature last_completed_;
  std::atomic<Path> last_path_{Path::none};
  std::atomic<bool> closed_{false};
  Trace trace_;
  Flight flight_;
  mutable std::mutex cause_mutex_;
  std::optional<Failure> cause_;
  std::atomic<bool> failed_{false};  // there is a cause
  std::mutex memory_mutex_;
  std::map<std::uint64_t, MappedFile> memory_;
};
}  // namespace sdp
