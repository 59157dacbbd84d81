// The record of one operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "clock.hpp"
#include "types.hpp"

namespace sdp {
struct Request;

// Times are those of CLOCK_MONOTONIC, which the ranks of a node share. core/trace_event.py knows
// this layout.
struct TraceEvent {
  static constexpr std::uint8_t kFailed = 1;
  static constexpr std::uint8_t kAsync = 2;    // ran in the engine's thread
  static constexpr std::uint8_t kStep = 4;     // a step of a larger group's operation
  static constexpr std::uint8_t kCompare = 8;  // a step that moves no data

  std::uint64_t seq = 0;
  std::int64_t issued_ns = 0;
  std::int64_t started_ns = 0;   // 0: it is queued
  std::int64_t arrived_ns = 0;   // end of the wait for ranks of this node; 0: unknown
  std::int64_t finished_ns = 0;  // 0: it is not done
  std::int64_t waited_ns = 0;    // since when a caller has waited for it; 0: no caller did
  std::uint64_t count = 0;
  std::uint64_t nbytes = 0;     // shown or taken by the rank, whichever is more
  std::int32_t last_rank = -1;  // the rank that arrived last, or did not arrive
  std::int32_t blamed = -1;     // of a failed operation
  std::int32_t peer = -1;       // or root
  std::uint32_t thread = 0;     // the thread that ran it
  std::uint32_t waiter = 0;     // the thread that waited for it
  std::uint32_t tag = 0;
  std::uint32_t layout = 0;  // of a fusion buffer
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  std::uint8_t flags = 0;
  std::uint8_t path = 0;
  std::uint8_t unused[7] = {};

  static TraceEvent of(const Request& request);
};
static_assert(sizeof(TraceEvent) == 104);
}  // namespace sdp
