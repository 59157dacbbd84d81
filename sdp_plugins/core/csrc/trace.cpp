#include "trace.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace sdp {

std::uint32_t this_thread() {
  return static_cast<std::uint32_t>(syscall(SYS_gettid));
}

void Trace::start() {
  const std::lock_guard lock(starting_);
  if (!slots_) {
    slots_.reset(static_cast<EventSlot*>(std::calloc(kEvents, sizeof(EventSlot))));
    if (!slots_) throw std::bad_alloc();
    ring_ = EventRing(next_, slots_.get(), kEvents);
  }
  first_.store(next_.load());
  on_.store(true, std::memory_order_release);
}

void Trace::add(const TraceEvent& event) {
  EventRing::Ticket ticket = 0;
  ring_.write(event, ticket);
}

std::vector<TraceEvent> Trace::events(std::uint64_t& dropped) const {
  const std::uint64_t end = next_.load(std::memory_order_acquire);
  const std::uint64_t first = first_.load();
  const std::uint64_t begin = std::max(first, end > kEvents ? end - kEvents : 0);
  dropped = begin - first;
  std::vector<TraceEvent> found;
  if (!slots_) return found;
  found.reserve(end - begin);
  TraceEvent event;
  for (std::uint64_t index = begin; index < end; ++index) {
    if (ring_.read(index, event)) found.push_back(event);
  }
  return found;
}
}  // namespace sdp
