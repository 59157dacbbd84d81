#include "flight_reader.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>

namespace sdp {
namespace {
FlightHead head_of(const Header& header) {
  FlightHead head;
  head.magic = header.magic;
  head.rank = header.rank;
  head.world_size = header.world_size;
  head.state = static_cast<std::uint32_t>(header.state.load(std::memory_order_acquire));
  head.waiting_remote = header.waiting_remote.load(std::memory_order_relaxed);
  head.step = header.step.value.load(std::memory_order_relaxed);
  if (head.state == static_cast<std::uint32_t>(PeerState::failed)) {
    head.cause_kind = static_cast<std::uint32_t>(header.failure.kind);
    std::copy(std::begin(header.failure.ranks), std::end(header.failure.ranks), head.cause_ranks);
    header.failure.summary().copy(head.cause_text, sizeof head.cause_text - 1);
  }
  return head;
}

// Copies memory that others write to. Acquire: whoever has read a new word of a slot also reads the
// slot's new stamp.
void read_words(const std::byte* from, std::uint64_t* to, std::size_t nbytes) {
  const auto* words = reinterpret_cast<const std::atomic<std::uint64_t>*>(from);
  for (std::size_t i = 0; i < nbytes / sizeof *to; ++i) {
    to[i] = words[i].load(std::memory_order_acquire);
  }
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

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::size_t kForming = offsetof(FlightArea, forming) / kWord;
constexpr std::size_t kRings = offsetof(FlightArea, rings) / kWord;
constexpr std::size_t kCapacities[] = {FlightRings::kOperations, FlightRings::kMessages,
                                       FlightRings::kSteps};

// Calls `visit` with the place, in words, of each slot that was given to an event.
template <class Visit>
void each_event(const std::uint64_t* area, const Visit& visit) {
  std::size_t slots = kRings + std::size(kCapacities);
  for (std::size_t ring = 0; ring < std::size(kCapacities); ++ring) {
    const std::uint64_t given = std::min<std::uint64_t>(area[kRings + ring], kCapacities[ring]);
    for (std::uint64_t i = 0; i < given; ++i) visit(slots + i * sizeof(EventSlot) / kWord);
    slots += kCapacities[ring] * sizeof(EventSlot) / kWord;
  }
}

// `read(to, at, words)` copies a part of a FlightArea. Data whose stamp, which precedes them, is
// the same in the copies before and after are consistent; else the stamp becomes 0. An event that
// is being written is read again: its thread may be preempted, or killed, so only for kPatienceUs.
template <class Read>
std::vector<std::byte> consistent_copy(const FlightHead& head, const Read& read) {
  constexpr useconds_t kPatienceUs = 20'000, kPauseUs = 100;
  constexpr std::size_t kWords = sizeof(FlightArea) / kWord;
  std::vector<std::byte> whole(sizeof head + sizeof(FlightArea));
  std::memcpy(whole.data(), &head, sizeof head);
  auto* const area = reinterpret_cast<std::uint64_t*>(whole.data() + sizeof head);
  std::vector<std::uint64_t> before(kWords), after(kWords);
  const auto read_thrice = [&](std::size_t at, std::size_t words) {
    for (std::uint64_t* to : {before.data(), area, after.data()}) read(to + at, at, words);
  };
  const auto settle = [&](std::size_t at) { area[at] = before[at] == after[at] ? after[at] : 0; };
  read_thrice(0, kWords);
  settle(kForming);
  useconds_t waited_us = 0;
  each_event(after.data(), [&](std::size_t at) {
    for (settle(at); area[at] == 0 && waited_us < kPatienceUs; settle(at)) {
      usleep(kPauseUs);
      waited_us += kPauseUs;
      read_thrice(at, sizeof(EventSlot) / kWord);
    }
  });
  return whole;
}
}  // namespace

std::vector<std::byte> copy_flight(const Segment& segment) {
  const auto* area = reinterpret_cast<const std::byte*>(&segment.flight());
  return consistent_copy(head_of(segment.header()),
                         [&](std::uint64_t* to, std::size_t at, std::size_t words) {
                           read_words(area + at * kWord, to, words * kWord);
                         });
}

std::vector<std::byte> copy_counters(const Segment& segment) {
  std::vector<std::byte> copy(sizeof(FlightCounters));
  read_words(reinterpret_cast<const std::byte*>(&segment.flight().counters),
             reinterpret_cast<std::uint64_t*>(copy.data()), copy.size());
  return copy;
}

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
  return consistent_copy(head_of(header),
                         [&](std::uint64_t* to, std::size_t word, std::size_t words) {
                           read_exactly(fd, to, words * kWord, at + word * kWord);
                         });
}
}  // namespace sdp
