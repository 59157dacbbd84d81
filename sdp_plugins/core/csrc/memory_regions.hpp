// Registered memory, which peers can map: the regions that this rank offers, and the mapped regions
// of the peers. Region ids are never reused, so a stale id cannot denote another region.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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
  // Returns the id. The peers map the region in the next operation that uses it, `with_view` also
  // copy on write. Throws Failure(shared_memory) without failing the group.
  std::uint64_t add(std::byte* data, std::uint64_t nbytes, int fd, std::uint64_t file_offset,
                    bool with_view = false);
  void remove(std::uint64_t region);

  // The place of `data` in a region that was announced to every peer; nullopt if there is none.
  std::optional<RegionPlace> find(const std::byte* data, std::uint64_t nbytes);
  std::uint64_t version();  // changes with every message to the peers

  // Reads the peer's messages if its `version` has changed; maps and unmaps accordingly.
  void sync(int rank, std::uint64_t version);
  // Address in this process of a peer's bytes; null if the peer does not offer the region, or not
  // any more. Throws Failure(mismatch) if the bytes do not lie in the region.
  std::byte* address(int rank, RegionPlace place, std::uint64_t nbytes) const;
  // A peer's region, which stays mapped as long as the result lives; null like `address`. Any
  // thread may call this.
  std::shared_ptr<const MappedFile> mapping(int rank, std::uint64_t region);

 private:
  struct Own {
    std::byte* data;
    std::uint64_t nbytes;
    bool announced;  // the file was sent to all peers
  };
  struct Message {
    std::uint64_t region, nbytes, file_offset, with_view;  // nbytes 0: unmap
  };
  // A message to one peer; waits in the outbox while the peer's socket is full.
  struct RegionUpdate {
    int to;
    Message message;
    FileDescriptor file;
  };
  bool send(const RegionUpdate& update);
  std::optional<RegionUpdate> receive(int rank);  // nullopt: no message is left
  void flush();

  const Peers& peers_;
  std::mutex mutex_;  // callers add and map regions while the engine's thread runs operations
  std::uint64_t next_region_ = 1;
  std::uint64_t version_ = 0;
  std::map<std::uint64_t, Own> own_;
  std::deque<RegionUpdate> outbox_;
  std::vector<std::uint64_t> seen_;
  std::vector<std::map<std::uint64_t, std::shared_ptr<const MappedFile>>> mapped_;
};

// Frees the physical memory of whole pages of registered memory, for all who map it. They are zeros
// until they are written again.
void give_back_pages(std::byte* data, std::size_t nbytes);
}  // namespace sdp
