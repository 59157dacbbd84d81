// The flight recorder: always records the last operations of a rank in its segment. Every rank of
// the node can read it, and so can any process that may open the segment's file, even after the
// rank has died.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "flight_layout.hpp"

namespace sdp {

// Writes this rank's flight recorder.
class Flight {
 public:
  Flight(FlightArea& area, int owner_pid);
  void write(const TraceEvent& event, EventRing::Ticket& ticket);
  // Counts an operation that has completed. `first_arrival_ns`: when the first rank of the node
  // began it; 0: unknown.
  void count(const TraceEvent& event, std::int64_t first_arrival_ns);
  // Shows the group that is being formed: a text, truncated to fit, and since when; 0: none.
  void show_forming(std::string_view text, std::uint64_t since_ns);
  std::uint32_t this_thread() const;  // asks the kernel once per thread
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void set_on(bool on) { on_.store(on); }  // to measure what it costs

 private:
  EventRing& ring_of(const TraceEvent& event);
  void count_arrivals(const TraceEvent& event, std::int64_t first_arrival_ns);

  int owner_pid_;
  FlightForming& forming_;
  FlightCounters& counters_;
  std::uint64_t last_counted_ = 0;  // the collective of which arrivals were counted last
  std::atomic<bool> on_{true};
  EventRing operations_, messages_, steps_;
};
}  // namespace sdp
