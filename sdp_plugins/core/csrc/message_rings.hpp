// The bytes on their way from one rank to another: a ring in the sender's segment for each rank
// that it sends to, with one writer and one reader. Nobody waits here; who has moved bytes rings
// the other's bell.
#pragma once

#include <cstddef>

#include "peers.hpp"

namespace sdp {

// A rank's view of the rings. Not for several threads at a time.
//
// All methods throw a Failure (mismatch) if the peer has put the ring's counters out of order.
class MessageRings {
 public:
  // `peers` is borrowed.
  MessageRings(const Peers& peers, int rank) : peers_(peers), rank_(rank) {}

  // Writes as much as there is room for; how many bytes. Where that is not all, the reader rings
  // when it has made room.
  std::size_t write(int dst, const std::byte* data, std::size_t nbytes);
  std::size_t readable(int src) const;  // bytes
  // Reads as much as there is; how many bytes.
  std::size_t read(int src, std::byte* data, std::size_t nbytes);

 private:
  const Peers& peers_;
  int rank_;
};
}  // namespace sdp
