// The trace of a rank: when its last kEvents operations were issued, ran and ended. Recorded while
// tracing is on, in memory of fixed size.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "event_ring.hpp"

namespace sdp {

class Trace {
 public:
  static constexpr std::size_t kEvents = 1 << 15;

  bool on() const { return on_.load(std::memory_order_acquire); }
  void start();  // drops earlier events; may throw bad_alloc
  void stop() { on_.store(false, std::memory_order_release); }
  void add(const TraceEvent& event);

  // Oldest first. `dropped`: number of earlier events that were overwritten.
  std::vector<TraceEvent> events(std::uint64_t& dropped) const;

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::atomic<bool> on_{false};
  std::mutex starting_;
  // Kept from the first start on; the kernel allocates its pages when they are used.
  std::unique_ptr<EventSlot[], Free> slots_;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> first_{0};  // since the last start
  EventRing ring_;
};

std::uint32_t this_thread();
}  // namespace sdp
