// Matches messages with receives: by source and tag, in the order in which receives were posted, as
// in MPI. A message that no receive accepts is kept as unexpected if a receive waits behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "operation_record.hpp"
#include "request.hpp"
#include "work.hpp"

namespace sdp {

// Precedes the bytes of each message.
struct Envelope {
  std::uint64_t nbytes;
  std::uint32_t tag;
  DType dtype;
};

// A send or a receive that is not done.
struct PendingMessage {
  Request request;
  std::shared_ptr<Work> work;
  OperationRecord record;   // begins with the first bytes
  std::uint64_t moved = 0;  // bytes, including the envelope of a send
  bool matched = false;     // for a receive: its message has begun to arrive
};

// A message that arrived before its receive was posted.
struct UnexpectedMessage {
  int source;
  Envelope envelope;
  std::vector<std::byte> bytes;
};

class Matching {
 public:
  PendingMessage& post(PendingMessage receive);  // the address stays valid
  PendingMessage remove(const PendingMessage& receive);
  std::list<PendingMessage> remove_all();
  // In the order in which they were posted.
  const std::list<PendingMessage>& posted() const { return posted_; }

  // Whether a receive waits for a message of this source.
  bool wants(int source) const;
  // Reserves the first receive that accepts such a message; null: none does.
  PendingMessage* match(int source, std::uint32_t tag);
  // Removes a receive that no message has matched; returns its place in the flight recorder.
  std::optional<EventRing::Ticket> take_back(const Work& work);

  void keep(UnexpectedMessage message) { unexpected_.push_back(std::move(message)); }
  // The first unexpected message that a receive accepts.
  std::optional<UnexpectedMessage> take_unexpected(const PendingMessage& receive);

 private:
  std::list<PendingMessage> posted_;
  std::list<UnexpectedMessage> unexpected_;  // in order of arrival
};
}  // namespace sdp
