// One operation as its caller describes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "op_signature.hpp"
#include "types.hpp"

namespace sdp {

// A contiguous run of elements in the caller's memory. Borrowed: valid until the operation is done.
struct Piece {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
};

// What makes a request one step of an operation of a larger group, whose ranks on this node these
// are.
struct Part {
  OpSignature operation = {};       // that operation, of which messages speak
  OpSignature last_completed = {};  // the larger group's
  bool compares_only = false;  // announces that operation; ends when all ranks here have agreed
  bool accumulates = false;    // reductions stay in accumulators: more are to come
  double patience_s = 0;       // added to the time-out while all that are late wait elsewhere
};

// What each operation shows to the others (`sends`) and takes from them (`recvs`): one piece, or
// one per rank where ranks get different pieces. In-place operations (all_reduce, reduce,
// broadcast) have their one buffer in `recvs`; that of all_reduce may lie in several pieces.
struct Request {
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  double factor = 1.0;       // PREMUL_SUM
  std::uint32_t layout = 0;  // of a fusion buffer; see FusionPlan
  int root = -1;
  std::vector<Piece> sends;
  std::vector<Piece> recvs;
  int peer = -1;  // send/recv; -1: from any rank
  std::uint32_t tag = 0;
  std::uint64_t seq = 0;  // recv: its number, where it is counted elsewhere; 0: here
  double timeout_s = 300.0;
  std::optional<Part> part = {};
  std::int64_t issued_ns = 0;  // where it had to queue

  std::uint64_t count() const;  // elements of all_reduce's buffer, or else of the largest piece
  OpSignature signature(std::uint64_t number = 0) const;
  // Throws std::invalid_argument for what can be seen without any other rank.
  void validate(int rank, int world_size) const;
};
}  // namespace sdp
