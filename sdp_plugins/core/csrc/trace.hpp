// When a rank's operations were issued, ran and ended: the last kEvents of them, in memory that
// does not grow, while this is on. Off, it costs a load and a branch per operation.
//
// Nothing here waits: writers take slots by an atomic counter and fill them word by word, and a
// reader leaves out what is written while it looks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "request.hpp"

namespace sdp {
class Work;

// Times are those of CLOCK_MONOTONIC, which the ranks of a node share. Python knows this layout:
// core/trace/events.py.
struct TraceEvent {
  static constexpr std::uint8_t kFailed = 1;
  static constexpr std::uint8_t kAsync = 2;    // ran in the engine's thread
  static constexpr std::uint8_t kStep = 4;     // of a larger group's operation
  static constexpr std::uint8_t kCompare = 8;  // such a step, in which nothing moves

  std::uint64_t seq = 0;
  std::int64_t issued_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t arrived_ns = 0;  // until when it waited for ranks of this node; 0: not known
  std::int64_t finished_ns = 0;
  std::int64_t waited_ns = 0;  // since when a caller has waited for it; 0: nobody did
  std::uint64_t count = 0;
  std::uint64_t nbytes = 0;     // of what the rank shows or takes, whichever is more
  std::int32_t last_rank = -1;  // who was waited for: who came last, or did not
  std::int32_t blamed = -1;     // of a failed operation
  std::int32_t peer = -1;       // or root
  std::uint32_t thread = 0;     // that ran it
  std::uint32_t waiter = 0;     // the thread that waited for it
  std::uint32_t tag = 0;
  std::uint32_t layout = 0;  // of a fusion buffer
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  std::uint8_t flags = 0;
  std::uint8_t path = 0;
  std::uint8_t unused[7] = {};

  static TraceEvent of(const Request& request);
};
static_assert(sizeof(TraceEvent) == 104);

class Trace {
 public:
  static constexpr std::size_t kEvents = 1 << 15;

  bool on() const { return on_.load(std::memory_order_acquire); }
  void start();  // forgets what was recorded before; may throw bad_alloc
  void stop() { on_.store(false, std::memory_order_release); }
  void add(const TraceEvent& event);

  // Oldest first. `dropped`: how many came before these and have been overwritten.
  std::vector<TraceEvent> events(std::uint64_t& dropped) const;

 private:
  static constexpr std::size_t kWords = sizeof(TraceEvent) / sizeof(std::uint64_t);
  struct Slot {
    std::atomic<std::uint64_t> stamp;  // 1 + the event's index; 0 while it is written
    std::array<std::atomic<std::uint64_t>, kWords> words;
  };
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::atomic<bool> on_{false};
  std::mutex starting_;
  std::unique_ptr<Slot[], Free>
      slots_;  // kept from the first start on; pages come as they are used
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> first_{0};  // since the last start
};

// The event of an operation that runs now, recorded when this ends. Nothing if the trace is off.
class TracedRun {
 public:
  TracedRun(Trace& trace, const Request& request, const Work* work);
  ~TracedRun() { end(); }
  TracedRun(const TracedRun&) = delete;
  TracedRun& operator=(const TracedRun&) = delete;
  TraceEvent* event() { return trace_ != nullptr ? &event_ : nullptr; }
  void end();

 private:
  Trace* trace_;
  const Work* work_;
  TraceEvent event_;
};

std::int64_t now_ns();  // monotonic
std::uint32_t this_thread();
}  // namespace sdp
