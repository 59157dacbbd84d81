#include "futex_counter.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace sdp {
namespace {
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
  if (muted.load(std::memory_order_relaxed) != 0) return;
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
}  // namespace sdp
