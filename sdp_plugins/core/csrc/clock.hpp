// The monotonic clock, which all ranks of a node share.
#pragma once

#include <cstdint>
#include <ctime>

namespace sdp {

inline std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline double now_s() {
  return 1e-9 * static_cast<double>(now_ns());
}
}  // namespace sdp
