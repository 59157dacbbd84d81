// Polls a counter for a while before its waiter sleeps.
#pragma once

#include <cstdint>

#include "futex_counter.hpp"

namespace sdp {

// How long to poll before sleeping. One barrier, measured with four ranks on two cores: spinning
// only 8 ms, yielding at once 4 us; with a core per rank: spinning 0.4 us, futex 23 us.
struct SpinPolicy {
  std::uint32_t pause_us = 0;  // spin with the processor's pause hint
  std::uint32_t yield_us = 0;  // then yield the core between polls

  // For a caller that only waits: `spin_us`; negative: chosen by the number of cores.
  static SpinPolicy of_callers(int spin_us, bool oversubscribed);
  static SpinPolicy background();  // for a thread beside a caller that computes
};

// Polls according to the policy; returns whether the target was reached.
bool spin_until(const FutexCounter& counter, std::uint32_t target, const SpinPolicy& policy);
}  // namespace sdp
