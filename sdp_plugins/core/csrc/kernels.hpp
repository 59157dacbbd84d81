// Element-wise arithmetic, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>

#include "types.hpp"

namespace sdp {

// The functions that reduce one pair (dtype, op). An "accumulator" is the type that sums are kept
// in: float for 16-bit floats (rounded once, at the end), a 64-bit integer for AVG of integers,
// else the element type itself. All pointers may alias exactly, never partly. `n` counts elements.
struct Kernel {
  std::size_t accumulator_size = 0;
  bool widens = false;  // accumulator and element differ, or values are scaled on the way in
  void (*load)(void* acc, const void* in, std::size_t n, double factor) = nullptr;
  void (*fold)(void* out, const void* a, const void* b, std::size_t n) = nullptr;  // accumulators
  void (*store)(void* out, const void* acc, std::size_t n, int divisor) = nullptr;
  // out = a + b on elements in one pass, for the most common case of two ranks; null if AVG or
  // scaled
  void (*pair)(void* out, const void* a, const void* b, std::size_t n) = nullptr;

  explicit operator bool() const { return fold != nullptr; }
};

using KernelTable = Kernel (*)(DType, ReduceOp);  // an empty Kernel: this pair has no meaning

KernelTable best_kernels();  // for the processor this runs on
Kernel kernel_baseline(DType dtype, ReduceOp op);
#if defined(__x86_64__)
Kernel kernel_avx2(DType dtype, ReduceOp op);
#endif
}  // namespace sdp
