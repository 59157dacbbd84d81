// Blocks of 8-bit or 4-bit numbers with a scale each, in which float32 values go between nodes.
//
// A block of up to 256 values is its scale (float32), then the numbers. Of 4-bit numbers, of which
// a block has h bytes, byte i holds number i in its lower half, and number i + h in its upper half.
// A number stands for its product with the scale, or for NaN or an infinity, so that these arrive
// as such. The scale is the largest finite |x| of the block, divided by the largest number:
//
// - int8: the integers -126 to 126. Rounding to the nearest changes x by max|x| / 252 at most.
// - int4: the integers -6 to 6. It changes x by max|x| / 12 at most.
// - fp8: E4M3, the largest number 416. It changes x by |x| / 16 at most, or by max|x| / 425,984 if
//   that is more.
//
// These bounds are exact up to float32's own rounding. If max|x| is less than 2^-100, all values of
// the block become 0. Stochastic rounding gives one of the two neighbours of x, in the mean x.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sdp {

constexpr std::size_t kBlock = 256;

enum class BlockFormat { int8, fp8, int4 };

// Of n values, the first of which begins a block.
constexpr std::size_t blocks_nbytes(BlockFormat format, std::size_t n) {
  const std::size_t numbers = format == BlockFormat::int4 ? (n + 1) / 2 : n;
  return (n + kBlock - 1) / kBlock * sizeof(float) + numbers;
}

// How values are rounded.
struct Rounding {
  bool stochastic = false;
  std::uint32_t seed = 0;  // of the random numbers
};

// Addresses need no alignment; memory must not overlap.
struct BlockKernels {
  // Writes blocks. `residual`, unless it is null, is added to the values before, and becomes what
  // the rounding has left out: 0 where a value is not finite.
  void (*pack)(void* blocks, const void* values, void* residual, std::size_t n, Rounding) = nullptr;
  // Writes the values of blocks.
  void (*unpack)(void* values, const void* blocks, std::size_t n) = nullptr;
};

using BlockTable = BlockKernels (*)(BlockFormat);

BlockTable best_blocks();  // for the current processor
BlockKernels blocks_baseline(BlockFormat format);
#if defined(__x86_64__)
BlockKernels blocks_avx2(BlockFormat format);
BlockKernels blocks_avx512(BlockFormat format);
#endif
}  // namespace sdp
