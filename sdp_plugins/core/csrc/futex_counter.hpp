// A counter in shared memory that one rank advances and others wait for.
//
// Memory ordering: `publish` is a release store, so everything the owner wrote before it is visible
// to every thread that has seen the new value (`reached` is an acquire load). The store and the
// load of `sleepers` must not be reordered, else a waiter could fall asleep just after the owner's
// load. Both sides therefore put a sequentially consistent fence between their store and their
// load.
#pragma once

#include <atomic>
#include <cstdint>

namespace sdp {

struct alignas(64) FutexCounter {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> muted;  // reasons not to wake sleepers: with any, `bump` wakes none

  // Counters wrap; they are compared by distance, which stays far below 2^31.
  bool reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
  void publish(std::uint32_t to);
  void bump();   // adds one and wakes sleepers; for several writers
  void alarm();  // as `bump`, and wakes sleepers even if it is muted
  void wake();   // wakes sleepers without progress: some other state has changed
  // Sleeps until the value differs from `seen`, a signal handler ran, or the time has passed.
  void sleep(std::uint32_t seen, std::uint32_t max_us);
};
static_assert(sizeof(FutexCounter) == 64, "one cache line: no false sharing between ranks");
}  // namespace sdp
