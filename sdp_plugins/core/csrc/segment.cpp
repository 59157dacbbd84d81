#include "segment.hpp"

#include <algorithm>

namespace sdp {
namespace {
constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}
constexpr std::size_t kPage = 4096;
constexpr std::size_t kAnnouncementsAt = 1024;
constexpr std::size_t kRunsBytes = round_up(kMostRuns * sizeof(Run), kAlign);
constexpr std::size_t kSplitsAt = kAnnouncementsAt + 2 * kAlign;
}  // namespace

Layout::Layout(int world_size, std::size_t staging_bytes)
    : world_size_(static_cast<std::size_t>(world_size)),
      splits_bytes_(round_up(world_size_ * sizeof(std::uint64_t), kAlign)),
      // Each slot is divided into one aligned piece per rank.
      slot_bytes_(
          round_up(std::max<std::size_t>(staging_bytes / kSlots, 1), kAlign * world_size_)) {}

std::size_t Layout::announcement(int parity) const {
  return kAnnouncementsAt + static_cast<std::size_t>(parity) * kAlign;
}
std::size_t Layout::splits(int parity) const {
  return kSplitsAt + static_cast<std::size_t>(parity) * splits_bytes_;
}
std::size_t Layout::expected(int parity) const {
  return splits(2) + static_cast<std::size_t>(parity) * splits_bytes_;
}
std::size_t Layout::runs(int parity) const {
  return expected(2) + static_cast<std::size_t>(parity) * kRunsBytes;
}
std::size_t Layout::inline_payload(int parity) const {
  return round_up(runs(2), kPage) + static_cast<std::size_t>(parity) * kInlineBytes;
}
std::size_t Layout::slot(int index) const {
  return inline_payload(2) + static_cast<std::size_t>(index) * slot_bytes_;
}
std::size_t Layout::ring_control(int dst) const {
  return round_up(slot(kSlots), kPage) + static_cast<std::size_t>(dst) * sizeof(RingControl);
}
std::size_t Layout::ring_data(int dst) const {
  return round_up(ring_control(static_cast<int>(world_size_)), kPage) +
         static_cast<std::size_t>(dst) * kRingBytes;
}
std::size_t Layout::flight() const {
  return ring_data(static_cast<int>(world_size_));
}
std::size_t Layout::total() const {
  return flight() + sizeof(FlightArea);
}
}  // namespace sdp
