#include "message_matching.hpp"

#include <algorithm>
#include <utility>

namespace sdp {
namespace {
bool accepts(const PendingMessage& receive, int source, std::uint32_t tag) {
  const Request& request = receive.request;
  return (request.peer < 0 || request.peer == source) && request.tag == tag;
}
}  // namespace

PendingMessage& Matching::post(PendingMessage receive) {
  return posted_.emplace_back(std::move(receive));
}

PendingMessage Matching::remove(const PendingMessage& receive) {
  const auto at =
      std::ranges::find(posted_, &receive, [](const PendingMessage& posted) { return &posted; });
  PendingMessage removed = std::move(*at);
  posted_.erase(at);
  return removed;
}

std::list<PendingMessage> Matching::remove_all() {
  return std::exchange(posted_, {});
}

bool Matching::wants(int source) const {
  return std::ranges::any_of(posted_, [&](const PendingMessage& receive) {
    return !receive.matched && (receive.request.peer < 0 || receive.request.peer == source);
  });
}

PendingMessage* Matching::match(int source, std::uint32_t tag) {
  for (PendingMessage& receive : posted_) {
    if (receive.matched || !accepts(receive, source, tag)) continue;
    receive.matched = true;
    return &receive;
  }
  return nullptr;
}

std::optional<EventRing::Ticket> Matching::take_back(const Work& work) {
  const auto at = std::ranges::find_if(posted_, [&](const PendingMessage& receive) {
    return receive.work.get() == &work && !receive.matched;
  });
  if (at == posted_.end()) return std::nullopt;
  return remove(*at).record.ticket();
}

std::optional<UnexpectedMessage> Matching::take_unexpected(const PendingMessage& receive) {
  const auto at = std::ranges::find_if(unexpected_, [&](const UnexpectedMessage& message) {
    return accepts(receive, message.source, message.envelope.tag);
  });
  if (at == unexpected_.end()) return std::nullopt;
  UnexpectedMessage taken = std::move(*at);
  unexpected_.erase(at);
  return taken;
}
}  // namespace sdp
