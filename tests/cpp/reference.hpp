// Reductions of one element at a time, written without a look at the kernels: what they must yield.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "blocks.hpp"
#include "kernels.hpp"
#include "types.hpp"

namespace reference {
using Bytes = std::vector<std::byte>;

// The two 16-bit formats, by the definition of IEEE 754 and in double precision.
struct Format {
  int mantissa_bits;
  int bias;
};
inline constexpr Format kFloat16{10, 15};
inline constexpr Format kBfloat16{7, 127};
double decode(Format format, std::uint16_t bits);
// Round to nearest, ties to even; `value` is not NaN.
std::uint16_t encode(Format format, double value);
bool is_nan(Format format, std::uint16_t bits);

bool defined(sdp::DType dtype, sdp::ReduceOp op);
// Tree over the sources, element by element.
Bytes reduce(sdp::DType dtype, sdp::ReduceOp op, const std::vector<Bytes>& sources,
             const std::vector<double>& factors);

// Elements of all sizes, with zeros of both signs, infinities, NaN, subnormal and extreme values.
Bytes sample(sdp::DType dtype, std::size_t count, std::uint32_t seed);
// Bit for bit, but one NaN is as good as another: which of two NaNs survives an addition depends on
// the order in which the compiler puts the operands.
bool same(sdp::DType dtype, const Bytes& a, const Bytes& b);

struct Table {
  std::string name;
  sdp::KernelTable kernels;
  sdp::BlockTable blocks;
};
std::vector<Table> tables();  // those that this processor can run
}  // namespace reference
