#include "trace.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <ctime>
#include <new>
#include <numeric>

#include "work.hpp"

namespace sdp {
namespace {
std::uint64_t total(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Piece& piece) { return sum + piece.count; });
}
}  // namespace

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::uint32_t this_thread() {
  return static_cast<std::uint32_t>(syscall(SYS_gettid));
}

TraceEvent TraceEvent::of(const Request& request) {
  TraceEvent event;
  event.issued_ns = request.issued_ns;
  event.count = request.op == Op::barrier ? 0 : request.count();
  event.nbytes = std::max(total(request.sends), total(request.recvs)) * itemsize(request.dtype);
  event.peer = is_rooted(request.op) ? request.root : request.peer;
  event.tag = request.tag;
  event.layout = request.layout;
  event.op = request.op;
  event.dtype = request.dtype;
  event.reduce_op = request.reduce_op;
  if (request.part) event.flags |= kStep;
  if (request.part && request.part->compares_only) event.flags |= kCompare;
  return event;
}

void Trace::start() {
  const std::lock_guard lock(starting_);
  if (!slots_) {
    slots_.reset(static_cast<Slot*>(std::calloc(kEvents, sizeof(Slot))));
    if (!slots_) throw std::bad_alloc();
  }
  first_.store(next_.load());
  on_.store(true, std::memory_order_release);
}

void Trace::add(const TraceEvent& event) {
  const std::uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = slots_[index % kEvents];
  const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(event);
  slot.stamp.store(0, std::memory_order_relaxed);
  // Each word is released: whoever has seen one of them sees that the slot is being written.
  for (std::size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.stamp.store(index + 1, std::memory_order_release);
}

std::vector<TraceEvent> Trace::events(std::uint64_t& dropped) const {
  const std::uint64_t end = next_.load(std::memory_order_acquire);
  const std::uint64_t first = first_.load();
  const std::uint64_t begin = std::max(first, end > kEvents ? end - kEvents : 0);
  dropped = begin - first;
  std::vector<TraceEvent> found;
  if (!slots_) return found;
  found.reserve(end - begin);
  for (std::uint64_t index = begin; index < end; ++index) {
    const Slot& slot = slots_[index % kEvents];
    if (slot.stamp.load(std::memory_order_acquire) != index + 1) continue;
    std::array<std::uint64_t, kWords> words;
    for (std::size_t i = 0; i < kWords; ++i) {
      words[i] = slot.words[i].load(std::memory_order_acquire);
    }
    if (slot.stamp.load(std::memory_order_relaxed) != index + 1) continue;
    found.push_back(std::bit_cast<TraceEvent>(words));
  }
  return found;
}

TracedRun::TracedRun(Trace& trace, const Request& request, const Work* work)
    : trace_(trace.on() ? &trace : nullptr), work_(work) {
  if (trace_ == nullptr) return;
  event_ = TraceEvent::of(request);
  event_.flags |= work != nullptr ? TraceEvent::kAsync : 0;
  event_.started_ns = now_ns();
  if (event_.issued_ns == 0) event_.issued_ns = event_.started_ns;  // it had not to queue
}

void TracedRun::end() {
  // One without a number has not run: its group had failed or was closed before.
  if (trace_ == nullptr || event_.seq == 0) return;
  event_.thread = this_thread();
  if (work_ == nullptr) {
    event_.waited_ns = event_.issued_ns;
    event_.waiter = event_.thread;
  } else {
    const Work::Waiter waiter = work_->waiter();
    event_.waited_ns = waiter.since_ns;
    event_.waiter = waiter.thread;
  }
  event_.finished_ns = now_ns();
  trace_->add(event_);
  trace_ = nullptr;
}
}  // namespace sdp
