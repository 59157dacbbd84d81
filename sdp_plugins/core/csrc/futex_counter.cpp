#include "futex_counter.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace sdp {
namespace {
inline void pause_hint() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Shared futexes (no PRIVATE flag): several processes map the word.
void futex_wake_all(std::atomic<std::uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
}  // namespace

void FutexCounter::publish(std::uint32_t to) {
  value.store(to, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(&value);
}

void FutexCounter::bump() {
  value.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (pollers.load(std::memory_order_relaxed) != 0) return;
  if (sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(&value);
}

void FutexCounter::alarm() {
  value.fetch_add(1, std::memory_order_acq_rel);
  wake();
}

void FutexCounter::wake() {
  futex_wake_all(&value);
}

void FutexCounter::sleep(std::uint32_t seen, std::uint32_t max_us) {
  const timespec limit{static_cast<time_t>(max_us / 1000000),
                       static_cast<long>(max_us % 1000000) * 1000};
  sleepers.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // The kernel compares again with its lock held: if the value differs from `seen`, the call
  // returns at once.
  syscall(SYS_futex, &value, FUTEX_WAIT, seen, &limit, nullptr, 0);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

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
