#include "flight_reader.hpp"

#include <unistd.h>

#include <algorithm>
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

// Copies a consistent snapshot of the words; the stamp is 0 if they are being written.
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

std::vector<std::byte> joined(const FlightHead& head, const char* rank_info) {
  std::vector<std::byte> whole(sizeof head + sizeof(FlightArea));
  std::memcpy(whole.data(), &head, sizeof head);
  std::memcpy(whole.data() + sizeof head, rank_info, FlightArea::kRankInfoBytes);
  return whole;
}
// Address of the FlightForming, which the rings follow.
std::uint64_t* forming_in(std::vector<std::byte>& whole) {
  return reinterpret_cast<std::uint64_t*>(whole.data() + sizeof(FlightHead) +
                                          FlightArea::kRankInfoBytes);
}
}  // namespace

std::vector<std::byte> copy_flight(const Segment& segment) {
  const FlightArea& area = segment.flight();
  std::vector<std::byte> whole = joined(head_of(segment.header()), area.rank_info);
  std::uint64_t* to = forming_in(whole);
  copy_stamped(area.forming.since_ns, area.forming.text, to);
  to += 1 + FlightForming::kWords;
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

// Reads stamps before and after the data: data whose stamp is the same both times are consistent.
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
  std::vector<char> rank_info(FlightArea::kRankInfoBytes);
  read_exactly(fd, rank_info.data(), rank_info.size(), at);
  std::vector<std::byte> whole = joined(head_of(header), rank_info.data());
  constexpr std::size_t kNbytes = sizeof(FlightForming) + sizeof(FlightRings);
  std::vector<std::uint64_t> before(kNbytes / 8), after(before.size());
  std::uint64_t* words = forming_in(whole);
  for (void* to : {static_cast<void*>(before.data()), static_cast<void*>(words),
                   static_cast<void*>(after.data())}) {
    read_exactly(fd, to, kNbytes, at + rank_info.size());
  }
  const auto compare = [&](std::size_t stamp) {
    if (before[stamp] != after[stamp]) words[stamp] = 0;
  };
  compare(0);
  for (std::size_t slot = 1 + FlightForming::kWords + 3; slot < before.size();
       slot += EventSlot::kWords + 1) {
    compare(slot);
  }
  return whole;
}
}  // namespace sdp
