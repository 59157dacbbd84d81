// The basic types of the core: data types, reduction operators and operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sdp {

enum class DType : std::uint8_t {
  float16,
  float32,
  float64,
  bfloat16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,
  complex64,
  complex128,
};
inline constexpr int kDTypes = 12;

enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
inline constexpr int kReduceOps = 9;

enum class Op : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  barrier,
  send,
  recv,
};
inline constexpr int kOps = 11;

std::string_view name(DType dtype);
std::string_view name(ReduceOp op);
std::string_view name(Op op);
std::size_t itemsize(DType dtype);
bool reduces(Op op);    // carries a reduction operator
bool is_rooted(Op op);  // carries a root
// Whether all ranks' buffers must have the same length; gathered and scattered pieces may differ.
bool counts_must_agree(Op op);
}  // namespace sdp
