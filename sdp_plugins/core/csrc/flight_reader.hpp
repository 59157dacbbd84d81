// Reads the flight recorder of a rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "segment.hpp"

namespace sdp {

// A reader gets this header and the bytes of a FlightArea. In these, the forming group's time and
// the stamps of slots are 0 if their data were written during the read. All contents are
// untrusted: a peer may have written anything. flight/rank_snapshot.py knows this layout.
struct FlightHead {
  std::uint64_t magic = 0;
  std::int32_t rank = 0;  // on its node
  std::int32_t world_size = 0;
  std::uint32_t cause_kind = 0;
  std::uint32_t state = 0;
  std::uint32_t waiting_remote = 0;
  std::uint32_t step = 0;
  std::int32_t cause_ranks[8] = {};
  char cause_text[512] = {};
};
static_assert(sizeof(FlightHead) == 576);

std::vector<std::byte> copy_flight(const Segment& segment);
std::vector<std::byte> copy_counters(const Segment& segment);  // the bytes of FlightCounters
// Reads a segment's file without mapping it: the file may be truncated at any time. Throws Failure.
std::vector<std::byte> read_flight(int fd);
}  // namespace sdp
