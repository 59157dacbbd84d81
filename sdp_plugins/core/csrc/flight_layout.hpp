// Where the flight recorder's data lie in a segment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "event_ring.hpp"

namespace sdp {

// In the segment. Each kind has a ring of its own: an operation that waits must not be overwritten
// by its own steps, nor by messages that go on meanwhile.
struct FlightRings {
  static constexpr std::size_t kOperations = 512;
  static constexpr std::size_t kMessages = 256;
  static constexpr std::size_t kSteps = 64;

  std::atomic<std::uint64_t> next[3];
  EventSlot operations[kOperations];
  EventSlot messages[kMessages];
  EventSlot steps[kSteps];
};

// The group that this rank's process is making, of which there is no segment yet.
struct FlightForming {
  static constexpr std::size_t kWords = 31;
  static constexpr std::size_t kTextBytes = kWords * sizeof(std::uint64_t);
  std::atomic<std::uint64_t> since_ns;  // 0: none, or it is being written
  std::array<std::atomic<std::uint64_t>, kWords> text;
};

struct FlightArea {
  static constexpr std::size_t kRankInfoBytes = 4096;
  char rank_info[kRankInfoBytes];  // whose this is: JSON, written before the rendezvous; ends with
                                   // a 0
  FlightForming forming;
  FlightRings rings;
};
}  // namespace sdp
