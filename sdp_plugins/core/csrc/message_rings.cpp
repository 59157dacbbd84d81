#include "message_rings.hpp"

#include <algorithm>
#include <cstring>

namespace sdp {
namespace {
// Validates the counters: the peer writes one of the two, and may have written anything.
std::size_t ring_used(std::uint64_t head, std::uint64_t tail, const Peers& peers, int peer) {
  const std::uint64_t used = head - tail;
  if (used <= kRingBytes) return used;
  throw peers.blame(FailureKind::mismatch, peer, " has put the channel to this rank out of order");
}
}  // namespace

std::size_t MessageRings::write(int dst, const std::byte* data, std::size_t nbytes) {
  const Segment& own = peers_.own();
  RingControl& ring = own.ring(dst);
  const std::uint64_t head = ring.head.load(std::memory_order_relaxed);
  const auto room = [&] {
    const std::uint64_t tail = ring.tail.load(std::memory_order_seq_cst);
    return kRingBytes - ring_used(head, tail, peers_, dst);
  };
  std::size_t n = room();
  if (n < nbytes) {
    // Set before the last check: either the check sees room, or the reader sees the request.
    ring.full.store(1, std::memory_order_seq_cst);
    n = room();
  }
  n = std::min(n, nbytes);
  if (n == 0) return 0;
  const std::size_t at = head % kRingBytes;
  const std::size_t first = std::min(n, kRingBytes - at);
  std::memcpy(own.ring_data(dst) + at, data, first);
  std::memcpy(own.ring_data(dst), data + first, n - first);
  ring.head.store(head + n, std::memory_order_release);
  peers_.segment(dst).header().bell.bump();
  return n;
}

std::size_t MessageRings::readable(int src) const {
  const RingControl& ring = peers_.segment(src).ring(rank_);
  return ring_used(ring.head.load(std::memory_order_acquire),
                   ring.tail.load(std::memory_order_relaxed), peers_, src);
}

std::size_t MessageRings::read(int src, std::byte* data, std::size_t nbytes) {
  const Segment& theirs = peers_.segment(src);
  RingControl& ring = theirs.ring(rank_);
  const std::size_t n = std::min(nbytes, readable(src));
  if (n == 0) return 0;
  const std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  const std::size_t at = tail % kRingBytes;
  const std::size_t first = std::min(n, kRingBytes - at);
  std::memcpy(data, theirs.ring_data(rank_) + at, first);
  std::memcpy(data + first, theirs.ring_data(rank_), n - first);
  ring.tail.store(tail + n, std::memory_order_seq_cst);
  if (ring.full.load(std::memory_order_seq_cst) != 0) {
    ring.full.store(0, std::memory_order_relaxed);
    theirs.header().bell.bump();
  }
  return n;
}
}  // namespace sdp
