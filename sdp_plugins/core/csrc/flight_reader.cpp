#include "flight_reader.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
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

// `read(to, nbytes, offset)` reads a part of the FlightArea.
template <class Read>
std::vector<std::byte> consistent_copy(const FlightHead& head, const Read& read) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::vector<std::byte> whole(sizeof head + sizeof(FlightArea));
  std::memcpy(whole.data(), &head, sizeof head);
  auto* const words = reinterpret_cast<std::uint64_t*>(whole.data() + sizeof head);
  std::size_t at = 0;  // in words
  const auto copy = [&](std::size_t count) {
    read(words + at, count * kWord, at * kWord);
    at += count;
  };
  // Data whose stamp is the same before and after are consistent; else the stamp becomes 0.
  const auto copy_stamped = [&](std::size_t count) {
    std::uint64_t before = 0, after = 0;
    const std::size_t stamp = at;
    read(&before, kWord, stamp * kWord);
    copy(1 + count);
    read(&after, kWord, stamp * kWord);
    words[stamp] = before == after ? after : 0;
  };
  copy(FlightArea::kRankInfoBytes / kWord);
  copy_stamped(FlightForming::kWords);
  copy(sizeof(FlightRings::next) / kWord);
  while (at < sizeof(FlightArea) / kWord) copy_stamped(EventSlot::kWords);
  return whole;
}
}  // namespace

std::vector<std::byte> copy_flight(const Segment& segment) {
  const auto* area = reinterpret_cast<const std::byte*>(&segment.flight());
  return consistent_copy(head_of(segment.header()),
                         [&](std::uint64_t* to, std::size_t nbytes, std::size_t offset) {
                           read_words(area + offset, to, nbytes);
                         });
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
                         [&](std::uint64_t* to, std::size_t nbytes, std::size_t offset) {
                           read_exactly(fd, to, nbytes, at + offset);
                         });
}
}  // namespace sdp
