#include "failure_record.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace sdp {
namespace {
// Number of bytes of a UTF-8 text that fit, in whole characters.
std::size_t fitting(const std::string& text, std::size_t most) {
  std::size_t length = std::min(text.size(), most);
  const auto continues = [&](std::size_t at) {  // a byte inside a character
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  while (length > 0 && continues(length)) --length;
  return length;
}

std::string cause_of(const FailureRecord& record) {
  return {record.cause, strnlen(record.cause, sizeof record.cause)};
}
}  // namespace

void FailureRecord::set(const Failure& failure, const RankNames& names, int rank) {
  kind = failure.kind;
  hint = failure.hint;
  origin_rank = failure.origin_rank < 0 ? rank : failure.origin_rank;
  global_origin_rank = names.global_rank(origin_rank);
  std::fill(std::begin(ranks), std::end(ranks), -1);
  std::copy_n(failure.ranks.begin(), std::min(failure.ranks.size(), kMostRanks), ranks);
  is_repeat = origin_rank != rank;
  const auto& failed = is_repeat != 0 ? failure.origin_operation : failure.operation;
  has_operation = failed.has_value();
  if (failed) operation = is_repeat != 0 ? *failed : failed->with_global_ranks(names);
  const std::size_t length = fitting(failure.cause, kMostBytes - 1);
  std::memcpy(cause, failure.cause.data(), length);
  cause[length] = '\0';
}

Failure FailureRecord::repeated(int writer, int reader, int group_size) const {
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < group_size; };
  std::vector<int> blamed;
  for (int rank : ranks) {
    if (!is_rank(rank)) break;
    blamed.push_back(rank);
  }
  if (blamed.empty()) blamed.push_back(writer);
  // For this rank, a peer that has closed or was interrupted is lost.
  const bool is_gone = kind > FailureKind::aborted;
  const FailureKind seen = is_gone ? FailureKind::peer_lost : kind;
  // A new group is the remedy of the rank that has aborted this one.
  const bool has_remedy = !is_gone && hint != Hint::new_group && *text(hint) != '\0';
  Failure failure(seen, cause_of(*this), std::move(blamed), has_remedy ? hint : default_hint(seen));
  failure.is_repeat = true;
  failure.origin_rank = is_rank(origin_rank) && origin_rank != reader ? origin_rank : writer;
  if (has_operation != 0) failure.origin_operation = operation;
  return failure;
}

std::string FailureRecord::summary() const {
  std::string text;
  if (is_repeat != 0) text += "rank " + std::to_string(global_origin_rank) + " gave up: ";
  if (has_operation != 0) text += operation.title(RankNames()) + ": ";
  return text + cause_of(*this);
}
}  // namespace sdp
