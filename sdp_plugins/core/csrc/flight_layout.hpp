// The layout of the flight recorder's data in a segment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "event_ring.hpp"

namespace sdp {

// Each kind of event has a ring of its own: the steps of a waiting operation, or later messages,
// must not overwrite it.
struct FlightRings {
  static constexpr std::size_t kOperations = 512;
  static constexpr std::size_t kMessages = 256;
  static constexpr std::size_t kSteps = 64;

  std::atomic<std::uint64_t> next[3];
  EventSlot operations[kOperations];
  EventSlot messages[kMessages];
  EventSlot steps[kSteps];
};

// The group that this rank's process is forming, which has no segment yet.
struct FlightForming {
  static constexpr std::size_t kWords = 31;
  static constexpr std::size_t kTextBytes = kWords * sizeof(std::uint64_t);
  std::atomic<std::uint64_t> since_ns;  // 0: none, or the text is being written
  std::array<std::atomic<std::uint64_t>, kWords> text;
};

// What a rank has done since the group was made; written by the process that owns the segment.
// core/counters.py knows this layout.
struct FlightCounters {
  using Counter = std::atomic<std::uint64_t>;
  Counter operations;     // collectives that have completed
  Counter nbytes;         // of them
  Counter busy_ns;        // time in them
  Counter waiting_ns;     // the part of it before the last rank of the node had begun them
  Counter last_arrivals;  // collectives that this rank was the last of the node to begin
  Counter awaited_ns;     // in these, the time since the first rank had begun them
  Counter messages;       // sends and receives that have completed
  Counter message_nbytes;
};

struct FlightArea {
  static constexpr std::size_t kRankInfoBytes = 4096;
  char rank_info[kRankInfoBytes];  // the rank's identity as JSON, 0-terminated; written before the
                                   // rendezvous
  FlightForming forming;
  FlightCounters counters;
  FlightRings rings;
};
}  // namespace sdp
