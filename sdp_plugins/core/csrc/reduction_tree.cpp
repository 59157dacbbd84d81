#include "reduction_tree.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sdp {
namespace {
constexpr std::size_t kBlockBytes = 2048;  // of accumulators: runs of many sources stay in L1
}

Kernel checked_kernel(DType dtype, ReduceOp op, KernelTable table) {
  const Kernel kernel = table(dtype, op);
  if (kernel) return kernel;
  std::string alternatives;
  for (int i = 0; i < kReduceOps; ++i) {
    const auto other = static_cast<ReduceOp>(i);
    if (table(dtype, other))
      alternatives += (alternatives.empty() ? "" : ", ") + std::string(name(other));
  }
  throw std::invalid_argument("reduction '" + std::string(name(op)) + "' is not defined for " +
                              std::string(name(dtype)) + "; it has: " + alternatives +
                              ". Hint: use one of these or convert the data first.");
}

Reducer::Reducer(DType dtype, ReduceOp op, std::vector<double> factors, KernelTable table)
    : kernel_(checked_kernel(dtype, op, table)),
      itemsize_(itemsize(dtype)),
      factors_(std::move(factors)) {}

// Sums sources [first, first + sources.size()) of all sources. Returns a pointer to accumulators in
// `scratch` (one block per level of the tree) or, for a leaf that needs no widening, in the source.
const std::byte* Reducer::subtree(std::span<const std::byte* const> sources, std::size_t first,
                                  std::size_t at, std::size_t n, std::byte* scratch) {
  if (sources.size() == 1) {
    const std::byte* source = sources[0] + at * source_size();
    if (!kernel_.widens || forms_.from_accumulators) return source;
    kernel_.load(scratch, source, n, factors_.empty() ? 1.0 : factors_[first]);
    return scratch;
  }
  const auto [left, right] = halves(sources, first, at, n, scratch);
  kernel_.fold(scratch, left, right, n);
  return scratch;
}

std::pair<const std::byte*, const std::byte*> Reducer::halves(
    std::span<const std::byte* const> sources, std::size_t first, std::size_t at, std::size_t n,
    std::byte* scratch) {
  const std::size_t half = std::bit_ceil(sources.size()) / 2;
  const std::byte* left = subtree(sources.first(half), first, at, n, scratch);
  return {left, subtree(sources.subspan(half), first + half, at, n, scratch + kBlockBytes)};
}

void Reducer::block(std::span<const std::byte* const> sources, std::byte* output, std::size_t at,
                    std::size_t n) {
  const int divisor = forms_.divisor > 0 ? forms_.divisor : static_cast<int>(sources.size());
  if (forms_.to_accumulators) {
    const std::byte* result = subtree(sources, 0, at, n, scratch_.data());
    if (result != output) std::memcpy(output, result, n * kernel_.accumulator_size);
  } else if (sources.size() == 1) {
    kernel_.store(output, subtree(sources, 0, at, n, scratch_.data()), n, divisor);
  } else if (in_one_pass(sources.size())) {
    kernel_.pair(output, sources[0] + at * itemsize_, sources[1] + at * itemsize_, n, divisor);
  } else {
    const auto [left, right] = halves(sources, 0, at, n, scratch_.data());
    kernel_.join(output, left, right, n, divisor);
  }
}

void Reducer::run(std::span<const std::byte* const> sources, std::span<std::byte* const> outputs,
                  std::size_t count, Forms forms) {
  forms_ = forms;
  const std::size_t size = forms.to_accumulators ? kernel_.accumulator_size : itemsize_;
  if (!in_one_pass(sources.size())) {
    scratch_.resize((std::bit_width(sources.size()) + 1) * kBlockBytes);
  }
  const std::size_t per_block = kBlockBytes / std::max(kernel_.accumulator_size, itemsize_);
  for (std::size_t at = 0; at < count; at += per_block) {
    const std::size_t n = std::min(per_block, count - at);
    std::byte* first = outputs[0] + at * size;
    block(sources, first, at, n);
    for (std::byte* other : outputs.subspan(1)) {
      if (other != outputs[0]) std::memcpy(other + at * size, first, n * size);
    }
  }
}
}  // namespace sdp
