// The description of one operation by its caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device_flags.hpp"
#include "op_signature.hpp"
#include "types.hpp"

namespace sdp {
class Work;

// A contiguous run of elements in the caller's memory. Borrowed: valid until the operation is done.
struct Piece {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
};

// Marks a request as one step of an operation of a larger group, of which this group is one node's
// share.
struct Part {
  OpSignature operation = {};       // the larger group's operation, for messages
  OpSignature last_completed = {};  // of the larger group
  bool compares_only = false;       // only compares the calls of this node's ranks
  bool accumulates = false;         // results stay in accumulators, for further reduction
  double patience_s = 0;  // added to the time-out while all late ranks wait for other nodes
};

// An operation shows `sends` to the other ranks and takes `recvs` from them: one piece, or one per
// rank if ranks get different pieces. In-place operations (all_reduce, reduce, broadcast) have
// their only buffer in `recvs`; that of all_reduce may lie in several pieces.
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
  std::uint64_t seq = 0;  // recv: its number in a larger group; 0: numbered by this group
  double timeout_s = 300.0;
  std::optional<Part> part = {};
  std::optional<DeviceFlags> device_flags = {};  // only of a collective that is submitted
  std::shared_ptr<Work> work = {};  // for Python: set once the operation may use the memory

  std::uint64_t count() const;  // elements of all_reduce's buffer, else of the largest piece
  OpSignature signature(std::uint64_t number = 0) const;
  // Throws std::invalid_argument for errors that show without the other ranks. `queued`: whether
  // the engine's thread will run it, which alone may wait for a device.
  void validate(int rank, int world_size, bool queued = false) const;
};
}  // namespace sdp
