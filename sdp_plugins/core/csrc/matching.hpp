// Which receive gets which message: receives match in the order in which they were posted, by
// source and tag, as in MPI. A message that none accepts is kept as unexpected if a receive waits
// behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "event_ring.hpp"
#include "request.hpp"
#include "work.hpp"

namespace sdp {

// What precedes the bytes of each message.
struct Envelope {
  std::uint64_t nbytes;
  std::uint32_t tag;
  DType dtype;
};

// A send or a receive that is not done.
struct PendingMessage {
  Request request;
  std::shared_ptr<Work> work;
  std::uint64_t seq;
  double started_s;
  std::uint64_t moved = 0;     // bytes, the envelope of a send included
  bool matched = false;        // a receive whose message has begun to arrive
  std::int64_t moving_ns = 0;  // since when; 0: it waits
  EventRing::Ticket ticket = 0;
};

// A message that came before a receive wanted it.
struct UnexpectedMessage {
  int source;
  Envelope envelope;
  std::vector<std::byte> bytes;
};

class Matching {
 public:
  PendingMessage& post(PendingMessage receive);  // its address stays
  PendingMessage remove(const PendingMessage& receive);
  std::list<PendingMessage> remove_all();
  // In the order in which they were posted.
  const std::list<PendingMessage>& posted() const { return posted_; }

  // Whether a receive waits for a message of this source.
  bool wants(int source) const;
  // The first receive that accepts such a message, which is its own from now on; null: none does.
  PendingMessage* match(int source, std::uint32_t tag);
  // Removes a receive that no message has been matched to; returns its place in the record.
  std::optional<EventRing::Ticket> take_back(const Work& work);

  void keep(UnexpectedMessage message) { unexpected_.push_back(std::move(message)); }
  // The first unexpected message that a receive accepts.
  std::optional<UnexpectedMessage> take_unexpected(const PendingMessage& receive);

 private:
  std::list<PendingMessage> posted_;
  std::list<UnexpectedMessage> unexpected_;  // in the order in which they came
};
}  // namespace sdp
