// The bytes in flight from one rank to another: a ring in the sender's segment for each receiver,
// with one writer and one reader. No function waits; a rank that has moved bytes rings the other
// rank's bell.
#pragma once

#include <cstddef>

#include "peers.hpp"

namespace sdp {

// A rank's view of the rings. Not thread-safe.
//
// All methods throw a Failure (mismatch) if the peer has put the ring's counters out of order.
class MessageRings {
 public:
  // `peers` is borrowed.
  MessageRings(const Peers& peers, int rank) : peers_(peers), rank_(rank) {}

  // Writes as many bytes as fit; returns their number. If not all fit, the reader rings when it has
  // made room.
  std::size_t write(int dst, const std::byte* data, std::size_t nbytes);
  std::size_t readable(int src) const;  // bytes
  // Reads as many bytes as there are, up to `nbytes`; returns their number.
  std::size_t read(int src, std::byte* data, std::size_t nbytes);

 private:
  const Peers& peers_;
  int rank_;
};
}  // namespace sdp
