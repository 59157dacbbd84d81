#include "flight.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sdp {
namespace {
constexpr std::size_t kEventSlots =
    FlightRings::kOperations + FlightRings::kMessages + FlightRings::kSteps;
static_assert(sizeof(FlightRings) == 3 * sizeof(std::uint64_t) + kEventSlots * sizeof(EventSlot));
static_assert(sizeof(FlightForming) == sizeof(std::uint64_t) + FlightForming::kTextBytes);
static_assert(sizeof(FlightArea) == FlightArea::kRankInfoBytes + sizeof(FlightForming) +
                                        sizeof(FlightCounters) + sizeof(FlightRings));
static_assert(sizeof(EventSlot) == sizeof(std::uint64_t) + sizeof(TraceEvent));

// One thread at a time runs collectives: this is cheaper than fetch_add.
void add(FlightCounters::Counter& counter, std::uint64_t more) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

struct ThreadId {
  int process = 0;
  std::uint32_t id = 0;
};
}  // namespace

Flight::Flight(FlightArea& area, int owner_pid)
    : owner_pid_(owner_pid),
      forming_(area.forming),
      counters_(area.counters),
      operations_(area.rings.next[0], area.rings.operations, FlightRings::kOperations),
      messages_(area.rings.next[1], area.rings.messages, FlightRings::kMessages),
      steps_(area.rings.next[2], area.rings.steps, FlightRings::kSteps) {}

EventRing& Flight::ring_of(const TraceEvent& event) {
  if ((event.flags & TraceEvent::kStep) != 0) return steps_;
  return event.op == Op::send || event.op == Op::recv ? messages_ : operations_;
}

void Flight::write(const TraceEvent& event, EventRing::Ticket& ticket) {
  if (on()) ring_of(event).write(event, ticket);
}

void Flight::count(const TraceEvent& event, std::int64_t first_arrival_ns) {
  if (!on()) return;
  if (event.op == Op::send || event.op == Op::recv) {
    counters_.messages.fetch_add(1, std::memory_order_relaxed);
    counters_.message_nbytes.fetch_add(event.nbytes, std::memory_order_relaxed);
    return;
  }
  if ((event.flags & TraceEvent::kStep) == 0) {
    add(counters_.operations, 1);
    add(counters_.nbytes, event.nbytes);
    add(counters_.busy_ns, static_cast<std::uint64_t>(event.finished_ns - event.started_ns));
  }
  if (first_arrival_ns > 0) count_arrivals(event, first_arrival_ns);
}

// Of an operation of several steps, only the first shows when the ranks' programs came to it. Peers
// may have announced any time.
void Flight::count_arrivals(const TraceEvent& event, std::int64_t first_arrival_ns) {
  if (event.seq == last_counted_) return;
  last_counted_ = event.seq;
  const std::int64_t last_ns = std::min(event.arrived_ns, event.finished_ns);
  if (last_ns > event.started_ns) {
    add(counters_.waiting_ns, static_cast<std::uint64_t>(last_ns - event.started_ns));
  } else if (first_arrival_ns < event.started_ns) {
    add(counters_.last_arrivals, 1);
    add(counters_.awaited_ns, static_cast<std::uint64_t>(event.started_ns - first_arrival_ns));
  }
}

void Flight::show_forming(std::string_view text, std::uint64_t since_ns) {
  std::array<char, FlightForming::kTextBytes> cut{};
  text.copy(cut.data(), cut.size());
  forming_.since_ns.store(0);
  for (std::size_t i = 0; i < FlightForming::kWords; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, cut.data() + i * sizeof word, sizeof word);
    // Release: a reader that has seen a new word also sees the 0 in `since_ns`.
    forming_.text[i].store(word, std::memory_order_release);
  }
  forming_.since_ns.store(since_ns, std::memory_order_release);
}

// The thread of a forked child, which may form its own groups, has another id than in the parent.
std::uint32_t Flight::this_thread() const {
  thread_local ThreadId mine;
  if (mine.process != owner_pid_) {
    mine = {owner_pid_, static_cast<std::uint32_t>(syscall(SYS_gettid))};
  }
  return mine.id;
}
}  // namespace sdp
