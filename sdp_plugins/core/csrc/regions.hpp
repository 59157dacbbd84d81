// Memory that peers can map ("registered"): which regions this rank offers, which of the peers' are
// mapped here. Region ids are never used twice, so a stale one cannot be mistaken for another.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "peers.hpp"

namespace sdp {

struct RegionPlace {
  std::uint64_t region = 0;
  std::uint64_t offset = 0;  // bytes
};

class Regions {
 public:
  explicit Regions(const Peers& peers);

  // Offers [data, data + nbytes), a shared mapping of `fd` at `file_offset`. `fd` is borrowed.
  // Returns the id. The peers learn of it with the next operation that uses it. Throws
  // Failure(shared_memory), which leaves the group as it was.
  std::uint64_t add(std::byte* data, std::uint64_t nbytes, int fd, std::uint64_t file_offset);
  void remove(std::uint64_t region);

  // Where `data` lies in a region that every peer has been announced of; nothing if in none.
  std::optional<RegionPlace> find(const std::byte* data, std::uint64_t nbytes);
  std::uint64_t version();  // changes whenever a peer has something to read

  // Reads what the peer has said, if its `version` changed; maps and unmaps accordingly.
  void sync(int rank, std::uint64_t version);
  // Address here of a peer's bytes; null if the peer offers no such region (any more). Throws
  // Failure(mismatch) if they do not lie in the region.
  std::byte* address(int rank, RegionPlace place, std::uint64_t nbytes) const;

 private:
  struct Own {
    std::byte* data;
    std::uint64_t nbytes;
    bool announced;  // all peers have been sent the file
  };
  struct Message {
    std::uint64_t region, nbytes, file_offset;  // nbytes 0: unmap
  };
  // A message waits here while the socket of its receiver is full.
  struct RegionUpdate {
    int to;
    Message message;
    FileDescriptor file;
  };
  bool send(const RegionUpdate& update);
  void flush();

  const Peers& peers_;
  std::mutex mutex_;  // regions come from the caller's thread, operations run in the engine's
  std::uint64_t next_region_ = 1;
  std::uint64_t version_ = 0;
  std::map<std::uint64_t, Own> own_;
  std::deque<RegionUpdate> outbox_;
  std::vector<std::uint64_t> seen_;
  std::vector<std::map<std::uint64_t, Mapping>> mapped_;
};
}  // namespace sdp
