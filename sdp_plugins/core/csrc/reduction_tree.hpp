// Reduction of a range of elements of several ranks, along one fixed binary tree.
//
// The tree over ranks [lo, hi) splits at the largest power of two below its size: ((0+1)+(2+3))
// + 4. The tree depends only on the number of ranks, so every path, chunking and arrival order
// gives the same bits, and so do 1 x 4, 2 x 2 and 4 x 1 layouts of nodes and ranks. 16-bit floats
// accumulate in float32 and are rounded once.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace sdp {

class Reducer {
 public:
  // `factors`: one per source, used by PREMUL_SUM only. Throws std::invalid_argument, which names
  // alternatives, if the pair (dtype, op) is not supported.
  Reducer(DType dtype, ReduceOp op, std::vector<double> factors = {},
          KernelTable table = best_kernels());

  // The format of sources and outputs, and the divisor of AVG (0: the number of sources).
  struct Forms {
    bool from_accumulators = false;
    bool to_accumulators = false;
    int divisor = 0;
  };

  // outputs[k][i] = tree over s of sources[s][i], for `count` elements. An output may be a source.
  // Reads each source once and writes each output once; works in blocks that stay in the L1 cache.
  void run(std::span<const std::byte* const> sources, std::span<std::byte* const> outputs,
           std::size_t count) {
    run(sources, outputs, count, Forms());
  }
  void run(std::span<const std::byte* const> sources, std::span<std::byte* const> outputs,
           std::size_t count, Forms forms);
  std::size_t accumulator_size() const { return kernel_.accumulator_size; }

 private:
  const std::byte* subtree(std::span<const std::byte* const> sources, std::size_t first,
                           std::size_t at, std::size_t n, std::byte* scratch);
  // The accumulators of the two subtrees of at least two sources.
  std::pair<const std::byte*, const std::byte*> halves(std::span<const std::byte* const> sources,
                                                       std::size_t first, std::size_t at,
                                                       std::size_t n, std::byte* scratch);
  void block(std::span<const std::byte* const> sources, std::byte* output, std::size_t at,
             std::size_t n);
  // Whether one kernel reads the sources and writes the result.
  bool in_one_pass(std::size_t sources) const {
    return sources == 2 && !forms_.from_accumulators && !forms_.to_accumulators &&
           kernel_.pair != nullptr;
  }
  std::size_t source_size() const {
    return forms_.from_accumulators ? kernel_.accumulator_size : itemsize_;
  }

  Kernel kernel_;
  std::size_t itemsize_;
  std::vector<double> factors_;
  Forms forms_;
  std::vector<std::byte> scratch_;
};

// Throws std::invalid_argument if the pair is not supported.
Kernel checked_kernel(DType dtype, ReduceOp op, KernelTable table = best_kernels());
}  // namespace sdp
