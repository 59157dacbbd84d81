// A failure as a rank shows it to the others, who repeat it: in shared memory, as fields.
#pragma once

#include "error.hpp"

namespace sdp {

// A peer may have written anything into it.
struct FailureRecord {
  static constexpr std::size_t kMostRanks = 8;
  static constexpr std::size_t kMostBytes = 512;

  FailureKind kind;
  Hint hint;
  std::int32_t origin_rank;
  std::int32_t global_origin_rank;
  std::int32_t ranks[kMostRanks];  // to blame; -1 ends the list
  std::uint8_t is_repeat;          // of what another rank has met
  std::uint8_t has_operation;
  OpSignature operation;       // that failed at the origin; with global ranks
  OpSignature last_completed;  // by who shows this
  double elapsed_s;
  char cause[kMostBytes];  // ends with a 0

  void set(const Failure& failure, const RankNames& names, int rank);
  // To rank `reader`, of a group of `group_size`, where rank `writer` has written it.
  Failure repeated(int writer, int reader, int group_size) const;
  std::string summary() const;  // for those who look on from outside of the group
};
}  // namespace sdp
