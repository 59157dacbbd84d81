#include "fusion_plan.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

#include "segment.hpp"

namespace sdp {

std::uint32_t layout_of(const std::vector<std::uint64_t>& counts) {  // FNV-1a
  std::uint32_t value = 2166136261;
  for (std::uint64_t word : counts) {
    for (int byte = 0; byte < 8; ++byte) {
      value = (value ^ static_cast<std::uint8_t>(word >> (8 * byte))) * 16777619;
    }
  }
  return value;
}

FusionPlan::FusionPlan(const std::vector<TensorSpec>& tensors, std::size_t threshold_bytes)
    : bucket_of_(tensors.size()) {
  if (threshold_bytes == 0 || threshold_bytes % kAlign != 0) {
    throw std::invalid_argument(
        "the threshold of a fusion buffer must be a positive multiple of 128 bytes, got " +
        std::to_string(threshold_bytes));
  }
  std::map<DType, Bucket> open;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [count, dtype] = tensors[i];
    const std::size_t item = itemsize(dtype);
    Bucket& bucket = open[dtype];
    if ((bucket.count + count) * item > threshold_bytes) seal(bucket);
    bucket.dtype = dtype;
    bucket.tensors.push_back(i);
    bucket.count += count;
    if (bucket.count * item >= threshold_bytes) seal(bucket);
  }
  for (auto& [dtype, bucket] : open) seal(bucket);
  std::sort(buckets_.begin(), buckets_.end(),
            [](const Bucket& a, const Bucket& b) { return a.tensors.back() < b.tensors.back(); });
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (std::size_t tensor : buckets_[b].tensors) bucket_of_[tensor] = b;
    // Hashes the tensors' indices too, as ranks may have different tensors ready.
    std::vector<std::uint64_t> words;
    for (std::size_t tensor : buckets_[b].tensors) {
      words.insert(words.end(), {tensor, tensors[tensor].count});
    }
    buckets_[b].layout = layout_of(words);
  }
}

void FusionPlan::seal(Bucket& bucket) {
  if (!bucket.tensors.empty()) buckets_.push_back(std::move(bucket));
  bucket = Bucket{};
}
}  // namespace sdp
