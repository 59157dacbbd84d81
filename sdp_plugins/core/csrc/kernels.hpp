// Element-wise arithmetic, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>

#include "types.hpp"

namespace sdp {

// The functions that reduce one pair (dtype, op). The accumulator is the type of partial sums:
// float for 16-bit floats (rounded once, at the end), a 64-bit integer for AVG of integers, else
// the element type itself. Pointers may be equal, but memory must not overlap partly. `n` counts
// elements.
struct Kernel {
  std::size_t accumulator_size = 0;
  bool widens = false;  // accumulator and element differ, or `load` scales values
  void (*load)(void* acc, const void* in, std::size_t n, double factor) = nullptr;
  void (*fold)(void* out, const void* a, const void* b, std::size_t n) = nullptr;  // accumulators
  void (*store)(void* out, const void* acc, std::size_t n, int divisor) = nullptr;
  // `fold` and `store` in one pass
  void (*join)(void* out, const void* a, const void* b, std::size_t n, int divisor) = nullptr;
  // `load` of both, `fold` and `store` in one pass, for two ranks; null for scaled values
  void (*pair)(void* out, const void* a, const void* b, std::size_t n, int divisor) = nullptr;

  explicit operator bool() const { return fold != nullptr; }
};

using KernelTable = Kernel (*)(DType, ReduceOp);  // an empty Kernel: the pair is not supported

KernelTable best_kernels();  // for the current processor
Kernel kernel_baseline(DType dtype, ReduceOp op);
#if defined(__x86_64__)
Kernel kernel_avx2(DType dtype, ReduceOp op);
Kernel kernel_avx512(DType dtype, ReduceOp op);
#endif
}  // namespace sdp
