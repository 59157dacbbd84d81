// Assigns tensors to fusion buffers: arithmetic only. The plan is the same on all ranks, because it
// depends only on the order, sizes and types of the registered tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.hpp"

namespace sdp {

struct TensorSpec {
  std::uint64_t count = 0;
  DType dtype = DType::float32;
};

// Hash of tensors' sizes: ranks must not sum buffers of equal size that hold different tensors.
std::uint32_t layout_of(const std::vector<std::uint64_t>& counts);

class FusionPlan {
 public:
  struct Bucket {
    DType dtype = DType::float32;
    std::vector<std::size_t> tensors;  // in registration order
    std::size_t count = 0;             // elements
    std::uint32_t layout = 0;          // hash of `tensors` and their sizes: ranks must agree
  };

  // `threshold_bytes`: a multiple of 128. Throws std::invalid_argument otherwise.
  FusionPlan(const std::vector<TensorSpec>& tensors, std::size_t threshold_bytes);

  // In the order in which they can complete: by their last tensor.
  const std::vector<Bucket>& buckets() const { return buckets_; }
  std::size_t bucket_of(std::size_t tensor) const { return bucket_of_[tensor]; }

 private:
  void seal(Bucket& bucket);

  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;
};
}  // namespace sdp
