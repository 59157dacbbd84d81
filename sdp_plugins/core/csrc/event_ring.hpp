// The last events of a rank, in memory of fixed size.
//
// No function waits: writers take slots by an atomic counter and fill them word by word, and a
// reader skips slots that are written while it reads. (If a writer sleeps in the middle of a slot
// while others fill the whole ring, that slot may be corrupt. It is a record only, not a result.)
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "trace_event.hpp"

namespace sdp {

struct EventSlot {
  static constexpr std::size_t kWords = sizeof(TraceEvent) / sizeof(std::uint64_t);
  // 1 + the event's index, shifted left by a byte that counts its versions; 0 during a write.
  std::atomic<std::uint64_t> stamp;
  std::array<std::atomic<std::uint64_t>, kWords> words;
};

class EventRing {
 public:
  // The stamp of the slot that holds an event; 0: none yet.
  using Ticket = std::uint64_t;

  EventRing() = default;
  // `capacity`: a power of two.
  EventRing(std::atomic<std::uint64_t>& next, EventSlot* slots, std::size_t capacity)
      : next_(&next), slots_(slots), capacity_(capacity) {}

  // Writes an event; overwrites its last version if the ring still has it.
  void write(const TraceEvent& event, Ticket& ticket);
  std::uint64_t next() const { return next_->load(std::memory_order_acquire); }
  // Reads the event of this index; false if it is not there or is being written.
  bool read(std::uint64_t index, TraceEvent& event) const;

 private:
  EventSlot& slot(std::uint64_t index) const { return slots_[index & (capacity_ - 1)]; }
  bool is_there(Ticket ticket) const;

  std::atomic<std::uint64_t>* next_ = nullptr;
  EventSlot* slots_ = nullptr;
  std::size_t capacity_ = 0;
};
}  // namespace sdp
