// Reads what the flight recorder of a rank has written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "segment.hpp"

namespace sdp {

// What a reader gets of a segment: this, and the bytes of a FlightArea, in which the forming
// group's time and the stamps of slots are 0 where these were written meanwhile. Nothing in it is
// to be believed: a peer may have written anything. Python knows this layout:
// flight/rank_snapshot.py.
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
// Of a segment's file, of which nothing is mapped: it may be cut short at any time. Throws Failure.
std::vector<std::byte> read_flight(int fd);
}  // namespace sdp
