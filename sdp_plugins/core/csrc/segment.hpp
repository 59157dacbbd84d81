// The shared memory of one rank: a memory file (memfd: no name, nothing left after SIGKILL).
//
//   Header | Announcement x 2 | splits x 2 | expected x 2 | runs x 2 | inline payload x 2 |
//   staging slots | point-to-point rings | flight recorder
//
// Even and odd operations alternate between the two copies of each area before the slots. Two
// suffice: a rank cannot be more than one operation ahead of any other, because each operation
// begins with the arrival of all ranks. The kernel allocates pages when they are first used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "failure_record.hpp"
#include "flight_layout.hpp"
#include "futex_counter.hpp"
#include "raii.hpp"
#include "types.hpp"

namespace sdp {

inline constexpr std::uint64_t kMagic = 0x31316b6c61706473;  // "sdpalk11"
inline constexpr std::size_t kAlign = 128;  // two cache lines: the prefetcher's pair
inline constexpr std::size_t kInlineBytes = 32 * 1024;
inline constexpr int kSlots = 3;  // a slot is filled, reduced and read in three successive rounds
inline constexpr std::size_t kRingBytes = 256 * 1024;
inline constexpr std::size_t kMostRuns = 256;

enum class PeerState : std::uint32_t { open, left, failed };

// A rank's announcement of an operation. All ranks compare the announcements before data moves.
struct Announcement {
  std::uint64_t seq;      // in this group
  OpSignature operation;  // of a step: with the number of the larger group's operation
  // Whether the whole payload lies in this segment's inline area; not bool, because a peer may have
  // written anything.
  std::uint8_t inlined;
  std::uint16_t pieces;          // number of pieces that the rank shows; `splits` has their lengths
  std::uint16_t runs;            // number of `runs` that are the buffer; 0: peers can't map it
  double factor;                 // PREMUL_SUM: factor of this rank's values
  std::uint64_t region_version;  // number of messages about regions to the peers so far
  std::int64_t arrived_ns;       // when the rank began the operation; 0: it does not record
};
static_assert(sizeof(Announcement) <= kAlign);

// Elements of a buffer that follow each other in registered memory, which the peers can map.
struct Run {
  std::uint64_t region;
  std::uint64_t offset;  // in the region, in bytes
  std::uint64_t count;
};

struct Header {
  std::uint64_t magic;
  std::int32_t rank;
  std::int32_t world_size;
  std::uint64_t staging_bytes;
  std::uint64_t flight_at;  // offset of the FlightArea, for readers outside of the group
  FailureRecord failure;    // of this rank; written before `state` becomes `failed`
  std::atomic<PeerState> state;
  std::atomic<std::uint32_t> waiting_remote;  // whether this rank waits for another node
  std::atomic<std::uint32_t> in_peer_memory;  // whether it accesses other ranks' registered memory
  FutexCounter step;                          // of collectives: steps that this rank has completed
  FutexCounter bell;  // of send/recv: rung by peers that wrote to or read from a ring
};
static_assert(sizeof(Header) <= 1024);

// One direction of a point-to-point channel: a byte ring, written by the segment's owner.
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> head;  // bytes ever written, by the owner
  std::atomic<std::uint32_t> full;              // whether the owner waits for room
  alignas(64) std::atomic<std::uint64_t> tail;  // bytes ever read, by the receiver
};

// Offsets of a segment's areas; every rank computes the same ones.
class Layout {
 public:
  Layout(int world_size, std::size_t staging_bytes);
  std::size_t announcement(int parity) const;
  std::size_t splits(int parity) const;
  std::size_t expected(int parity) const;
  std::size_t runs(int parity) const;
  std::size_t inline_payload(int parity) const;
  std::size_t slot(int index) const;
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t ring_control(int dst) const;
  std::size_t ring_data(int dst) const;
  std::size_t flight() const;
  std::size_t total() const;

 private:
  std::size_t world_size_, splits_bytes_, slot_bytes_;
};

// Typed access to one rank's mapped segment.
class Segment {
 public:
  Segment(Mapping mapping, const Layout* layout) : mapping_(std::move(mapping)), layout_(layout) {}
  Header& header() const { return *at<Header>(0); }
  Announcement& announcement(std::uint64_t seq) const {
    return *at<Announcement>(layout_->announcement(seq & 1));
  }
  std::uint64_t* splits(std::uint64_t seq) const {
    return at<std::uint64_t>(layout_->splits(seq & 1));
  }
  // Elements that this rank takes from each rank; see copy_exchange.
  std::uint64_t* expected(std::uint64_t seq) const {
    return at<std::uint64_t>(layout_->expected(seq & 1));
  }
  Run* runs(std::uint64_t seq) const { return at<Run>(layout_->runs(seq & 1)); }
  std::byte* inline_payload(std::uint64_t seq) const {
    return at<std::byte>(layout_->inline_payload(seq & 1));
  }
  std::byte* slot(std::size_t round) const {
    return at<std::byte>(layout_->slot(static_cast<int>(round % kSlots)));
  }
  RingControl& ring(int dst) const { return *at<RingControl>(layout_->ring_control(dst)); }
  std::byte* ring_data(int dst) const { return at<std::byte>(layout_->ring_data(dst)); }
  FlightArea& flight() const { return *at<FlightArea>(layout_->flight()); }

 private:
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(mapping_.data() + offset);
  }
  Mapping mapping_;
  const Layout* layout_;
};
}  // namespace sdp
