// Identifies an operation in messages: the call and its number, without its memory.
#pragma once

#include <cstdint>
#include <string>

#include "rank_names.hpp"
#include "types.hpp"

namespace sdp {

// Plain data: it lies in shared memory and travels between nodes. Ranks are those of the group.
struct OpSignature {
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  std::int32_t root = -1;
  std::int32_t peer = -1;  // send/recv; -1: from any rank
  std::uint32_t tag = 0;
  std::uint32_t layout = 0;  // of a fusion buffer
  std::uint64_t count = 0;
  std::uint64_t seq = 0;  // 0: not numbered

  bool is_numbered() const { return seq != 0; }
  std::string number() const;                       // "all_reduce #7"
  std::string shape(const RankNames& names) const;  // "float32[25165824] sum"
  std::string title(const RankNames& names) const;  // both
  OpSignature with_global_ranks(const RankNames& names) const;
};
}  // namespace sdp
