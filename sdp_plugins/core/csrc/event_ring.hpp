// The last events of a rank, in memory that does not grow.
//
// Nothing here waits: writers take slots by an atomic counter and fill them word by word, and a
// reader leaves out what is written while it looks. (A writer that sleeps in the midst of a slot
// while others go once round may spoil that slot: a record, not a result.)
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "trace_event.hpp"

namespace sdp {

struct EventSlot {
  static constexpr std::size_t kWords = sizeof(TraceEvent) / sizeof(std::uint64_t);
  // 1 + the event's index, shifted by a byte that counts its versions; 0 while it is written.
  std::atomic<std::uint64_t> stamp;
  std::array<std::atomic<std::uint64_t>, kWords> words;
};

class EventRing {
 public:
  // Where an event was written: its slot's stamp; 0: nowhere yet.
  using Ticket = std::uint64_t;

  EventRing() = default;
  // `capacity`: a power of two.
  EventRing(std::atomic<std::uint64_t>& next, EventSlot* slots, std::size_t capacity)
      : next_(&next), slots_(slots), capacity_(capacity) {}

  // The place of an event that is written later. For callers that hold a lock; cheaper than to
  // have `write` find one.
  Ticket reserve();
  // Writes an event, or its next version over the last one, if that is still there.
  void write(const TraceEvent& event, Ticket& ticket);
  // The same of an event that has only ended since: fewer words.
  void end(const TraceEvent& event, Ticket& ticket);
  std::uint64_t next() const { return next_->load(std::memory_order_acquire); }
  // Whether the event of this number is there, and whole.
  bool read(std::uint64_t index, TraceEvent& event) const;

 private:
  EventSlot& slot(std::uint64_t index) const { return slots_[index & (capacity_ - 1)]; }
  bool is_there(Ticket ticket) const;

  std::atomic<std::uint64_t>* next_ = nullptr;
  EventSlot* slots_ = nullptr;
  std::size_t capacity_ = 0;
};
}  // namespace sdp
