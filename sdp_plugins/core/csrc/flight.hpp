// The flight recorder: the last operations of a rank, always, in its segment. So every rank of the
// node can read it, and whoever may open the segment's file, also when the rank has died.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "event_ring.hpp"

namespace sdp {
class Segment;

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
struct FlightMeeting {
  static constexpr std::size_t kWords = 31;
  static constexpr std::size_t kTextBytes = kWords * sizeof(std::uint64_t);
  std::atomic<std::uint64_t> since_ns;  // 0: none, or it is being written
  std::array<std::atomic<std::uint64_t>, kWords> text;
};

struct FlightArea {
  static constexpr std::size_t kAboutBytes = 4096;
  char about[kAboutBytes];  // whose this is: JSON, written before the rendezvous; ends with a 0
  FlightMeeting meeting;
  FlightRings rings;
};

// Writes this rank's.
class Flight {
 public:
  Flight(FlightArea& area, int owner_pid);
  void write(const TraceEvent& event, EventRing::Ticket& ticket);
  // Of a collective; see EventRing. The caller holds the engine's lock.
  EventRing::Ticket reserve(bool step);
  void end(const TraceEvent& event, EventRing::Ticket& ticket);
  // Shows what is being made: a text, cut to what there is place for, and since when; 0: nothing.
  void meet(std::string_view text, std::uint64_t since_ns);
  std::uint32_t this_thread() const;  // asks the kernel once per thread
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void set_on(bool on) { on_.store(on); }  // to measure what it costs

 private:
  EventRing& ring_of(const TraceEvent& event);

  int owner_pid_;
  FlightMeeting& meeting_;
  std::atomic<bool> on_{true};
  EventRing operations_, messages_, steps_;
};

// What a reader gets of a segment: this, and the bytes of a FlightArea, in which the meeting's time
// and the stamps of slots are 0 where these were written meanwhile. Nothing in it is to be
// believed: a peer may have written anything. Python knows this layout: flight/rank_snapshot.py.
struct FlightHead {
  std::uint64_t magic = 0;
  std::int32_t rank = 0;  // on its node
  std::int32_t world_size = 0;
  std::uint32_t cause_kind = 0;
  std::uint32_t state = 0;
  std::uint32_t elsewhere = 0;
  std::uint32_t step = 0;
  std::int32_t cause_ranks[8] = {};
  char cause_text[512] = {};
};
static_assert(sizeof(FlightHead) == 576);

std::vector<std::byte> copy_flight(const Segment& segment);
// Of a segment's file, of which nothing is mapped: it may be cut short at any time. Throws Failure.
std::vector<std::byte> read_flight(int fd);
}  // namespace sdp
