#include "spin_wait.hpp"

#include <sched.h>

#include "clock.hpp"

namespace sdp {
namespace {
inline void pause_hint() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}
}  // namespace

SpinPolicy SpinPolicy::of_callers(int spin_us, bool oversubscribed) {
  if (spin_us >= 0) return SpinPolicy{static_cast<std::uint32_t>(spin_us), 0};
  return oversubscribed ? SpinPolicy{0, 30} : SpinPolicy{10, 150};
}

SpinPolicy SpinPolicy::background() {
  return SpinPolicy{2, 20};
}

bool spin_until(const FutexCounter& counter, std::uint32_t target, const SpinPolicy& policy) {
  if (counter.reached(target)) return true;
  if (policy.pause_us == 0 && policy.yield_us == 0) return false;
  const double start = now_s();
  const double pause_end = start + 1e-6 * policy.pause_us;
  while (policy.pause_us > 0) {
    for (int i = 0; i < 32; ++i) {
      pause_hint();
      if (counter.reached(target)) return true;
    }
    if (now_s() >= pause_end) break;
  }
  const double yield_end = pause_end + 1e-6 * policy.yield_us;
  while (now_s() < yield_end) {
    sched_yield();
    if (counter.reached(target)) return true;
  }
  return false;
}
}  // namespace sdp
