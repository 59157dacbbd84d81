#include "flight.hpp"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "segment.hpp"

namespace sdp {
namespace {
constexpr std::size_t kSlots =
    FlightRings::kOperations + FlightRings::kMessages + FlightRings::kSteps;
static_assert(sizeof(FlightRings) == 3 * sizeof(std::uint64_t) + kSlots * sizeof(EventSlot));
static_assert(sizeof(FlightMeeting) == sizeof(std::uint64_t) + FlightMeeting::kTextBytes);
static_assert(sizeof(FlightArea) ==
              FlightArea::kAboutBytes + sizeof(FlightMeeting) + sizeof(FlightRings));
static_assert(sizeof(EventSlot) == sizeof(std::uint64_t) + sizeof(TraceEvent));

struct ThreadId {
  int process = 0;
  std::uint32_t id = 0;
};

FlightHead head_of(const Header& header) {
  FlightHead head;
  head.magic = header.magic;
  head.rank = header.rank;
  head.world_size = header.world_size;
  head.state = static_cast<std::uint32_t>(header.state.load(std::memory_order_acquire));
  head.elsewhere = header.elsewhere.load(std::memory_order_relaxed);
  head.step = header.step.value.load(std::memory_order_relaxed);
  if (head.state == static_cast<std::uint32_t>(PeerState::failed)) {
    head.cause_kind = static_cast<std::uint32_t>(header.failure.kind);
    std::copy(std::begin(header.failure.ranks), std::end(header.failure.ranks), head.cause_ranks);
    header.failure.summary().copy(head.cause_text, sizeof head.cause_text - 1);
  }
  return head;
}

// Words as they are at one moment; their stamp is 0 if they are being written.
template <class Words>
void copy_stamped(const std::atomic<std::uint64_t>& stamp, const Words& words, std::uint64_t* to) {
  to[0] = stamp.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < words.size(); ++i) {
    to[i + 1] = words[i].load(std::memory_order_acquire);
  }
  if (stamp.load(std::memory_order_relaxed) != to[0]) to[0] = 0;
}

void read_exactly(int fd, void* to, std::size_t nbytes, std::uint64_t offset) {
  auto* data = static_cast<std::byte*>(to);
  while (nbytes > 0) {
    const ssize_t got = pread(fd, data, nbytes, static_cast<off_t>(offset));
    if (got <= 0) throw Failure(FailureKind::mismatch, "a segment's file is cut short");
    data += got;
    nbytes -= static_cast<std::size_t>(got);
    offset += static_cast<std::uint64_t>(got);
  }
}

std::vector<std::byte> joined(const FlightHead& head, const char* about) {
  std::vector<std::byte> whole(sizeof head + sizeof(FlightArea));
  std::memcpy(whole.data(), &head, sizeof head);
  std::memcpy(whole.data() + sizeof head, about, FlightArea::kAboutBytes);
  return whole;
}
// Where the meeting is, and behind it the rings.
std::uint64_t* meeting_in(std::vector<std::byte>& whole) {
  return reinterpret_cast<std::uint64_t*>(whole.data() + sizeof(FlightHead) +
                                          FlightArea::kAboutBytes);
}
}  // namespace

Flight::Flight(FlightArea& area, int owner_pid)
    : owner_pid_(owner_pid),
      meeting_(area.meeting),
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

EventRing::Ticket Flight::reserve(bool step) {
  return on() ? (step ? steps_ : operations_).reserve() : 0;
}

void Flight::end(const TraceEvent& event, EventRing::Ticket& ticket) {
  if (on()) ring_of(event).end(event, ticket);
}

void Flight::meet(std::string_view text, std::uint64_t since_ns) {
  std::array<char, FlightMeeting::kTextBytes> cut{};
  text.copy(cut.data(), cut.size());
  meeting_.since_ns.store(0);
  for (std::size_t i = 0; i < FlightMeeting::kWords; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, cut.data() + i * sizeof word, sizeof word);
    // Ordered behind the 0, so that who reads a new word sees it in the end.
    meeting_.text[i].store(word, std::memory_order_release);
  }
  meeting_.since_ns.store(since_ns, std::memory_order_release);
}

// A forked child that makes groups of its own has another id than the thread that forked.
std::uint32_t Flight::this_thread() const {
  thread_local ThreadId mine;
  if (mine.process != owner_pid_) {
    mine = {owner_pid_, static_cast<std::uint32_t>(syscall(SYS_gettid))};
  }
  return mine.id;
}

std::vector<std::byte> copy_flight(const Segment& segment) {
  const FlightArea& area = segment.flight();
  std::vector<std::byte> whole = joined(head_of(segment.header()), area.about);
  std::uint64_t* to = meeting_in(whole);
  copy_stamped(area.meeting.since_ns, area.meeting.text, to);
  to += 1 + FlightMeeting::kWords;
  for (const auto& next : area.rings.next) *to++ = next.load(std::memory_order_acquire);
  const auto copy = [&to](const EventSlot* slots, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i, to += EventSlot::kWords + 1) {
      copy_stamped(slots[i].stamp, slots[i].words, to);
    }
  };
  copy(area.rings.operations, FlightRings::kOperations);
  copy(area.rings.messages, FlightRings::kMessages);
  copy(area.rings.steps, FlightRings::kSteps);
  return whole;
}

// Stamps are read before and after the rest: what has the same one both times was not written.
std::vector<std::byte> read_flight(int fd) {
  alignas(Header) std::byte raw[sizeof(Header)];
  read_exactly(fd, raw, sizeof raw, 0);
  const auto& header = *reinterpret_cast<const Header*>(raw);
  if (header.magic != kMagic) {
    throw Failure(FailureKind::mismatch, "a segment of another version of sdp_plugins");
  }
  const std::uint64_t at = header.flight_at;
  if (at > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()) - sizeof(FlightArea)) {
    throw Failure(FailureKind::mismatch, "a segment has no flight record");
  }
  std::vector<char> about(FlightArea::kAboutBytes);
  read_exactly(fd, about.data(), about.size(), at);
  std::vector<std::byte> whole = joined(head_of(header), about.data());
  constexpr std::size_t kNbytes = sizeof(FlightMeeting) + sizeof(FlightRings);
  std::vector<std::uint64_t> before(kNbytes / 8), after(before.size());
  std::uint64_t* words = meeting_in(whole);
  for (void* to : {static_cast<void*>(before.data()), static_cast<void*>(words),
                   static_cast<void*>(after.data())}) {
    read_exactly(fd, to, kNbytes, at + about.size());
  }
  const auto compare = [&](std::size_t stamp) {
    if (before[stamp] != after[stamp]) words[stamp] = 0;
  };
  compare(0);
  for (std::size_t slot = 1 + FlightMeeting::kWords + 3; slot < before.size();
       slot += EventSlot::kWords + 1) {
    compare(slot);
  }
  return whole;
}
}  // namespace sdp
