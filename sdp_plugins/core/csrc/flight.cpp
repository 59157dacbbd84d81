#include "flight.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace sdp {
namespace {
constexpr std::size_t kEventSlots =
    FlightRings::kOperations + FlightRings::kMessages + FlightRings::kSteps;
static_assert(sizeof(FlightRings) == 3 * sizeof(std::uint64_t) + kEventSlots * sizeof(EventSlot));
static_assert(sizeof(FlightForming) == sizeof(std::uint64_t) + FlightForming::kTextBytes);
static_assert(sizeof(FlightArea) ==
              FlightArea::kRankInfoBytes + sizeof(FlightForming) + sizeof(FlightRings));
static_assert(sizeof(EventSlot) == sizeof(std::uint64_t) + sizeof(TraceEvent));

struct ThreadId {
  int process = 0;
  std::uint32_t id = 0;
};
}  // namespace

Flight::Flight(FlightArea& area, int owner_pid)
    : owner_pid_(owner_pid),
      forming_(area.forming),
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
