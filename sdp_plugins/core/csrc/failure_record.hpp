// A rank's failure as fields in shared memory, from which the other ranks repeat it.
#pragma once

#include "error.hpp"

namespace sdp {

// Its contents are untrusted: a peer may have written anything.
struct FailureRecord {
  static constexpr std::size_t kMostRanks = 8;
  static constexpr std::size_t kMostBytes = 512;

  FailureKind kind;
  Hint hint;
  std::int32_t origin_rank;
  std::int32_t global_origin_rank;
  std::int32_t ranks[kMostRanks];  // to blame; -1 ends the list
  std::uint8_t is_repeat;          // of another rank's failure
  std::uint8_t has_operation;
  OpSignature operation;   // that failed at the origin; with global ranks
  char cause[kMostBytes];  // ends with a 0

  void set(const Failure& failure, const RankNames& names, int rank);
  // The failure for rank `reader` of a group of `group_size`; rank `writer` has written it.
  Failure repeated(int writer, int reader, int group_size) const;
  std::string summary() const;  // for readers outside of the group
};
}  // namespace sdp
