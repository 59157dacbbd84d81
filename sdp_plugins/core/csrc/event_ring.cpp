#include "event_ring.hpp"

#include <bit>

namespace sdp {
namespace {
constexpr int kVersionBits = 8;
using Words = std::array<std::uint64_t, EventSlot::kWords>;
}  // namespace

bool EventRing::is_there(Ticket ticket) const {
  const std::uint64_t index = (ticket >> kVersionBits) - 1;
  return ticket != 0 && next_->load(std::memory_order_relaxed) - index <= capacity_;
}

void EventRing::write(const TraceEvent& event, Ticket& ticket) {
  if (is_there(ticket)) {
    ++ticket;
  } else {
    ticket = (next_->fetch_add(1, std::memory_order_relaxed) + 1) << kVersionBits;
  }
  EventSlot& to = slot((ticket >> kVersionBits) - 1);
  const auto words = std::bit_cast<Words>(event);
  to.stamp.store(0, std::memory_order_relaxed);
  // Release stores: a reader that has seen one of the words also sees the stamp's 0.
  for (std::size_t i = 0; i < words.size(); ++i) {
    to.words[i].store(words[i], std::memory_order_release);
  }
  to.stamp.store(ticket, std::memory_order_release);
}

bool EventRing::read(std::uint64_t index, TraceEvent& event) const {
  const EventSlot& from = slot(index);
  const std::uint64_t stamp = from.stamp.load(std::memory_order_acquire);
  if (stamp >> kVersionBits != index + 1) return false;
  Words words;
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = from.words[i].load(std::memory_order_acquire);
  }
  event = std::bit_cast<TraceEvent>(words);
  return from.stamp.load(std::memory_order_relaxed) == stamp;
}
}  // namespace sdp
