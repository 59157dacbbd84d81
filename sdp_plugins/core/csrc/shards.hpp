// Computes which bytes move when: arithmetic only, without memory access or waiting.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sdp {

struct Range {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// `total` elements divided into `parts` equal shards. All shards start at a multiple of `align`
// elements; only the last ones are shorter, or empty.
class Shards {
 public:
  Shards(std::size_t total, int parts, std::size_t align)
      : total_(total), length_(round_up(ceil_div(total, static_cast<std::size_t>(parts)), align)) {}

  Range shard(int index) const { return clip(static_cast<std::size_t>(index) * length_, length_); }

  // The part of a shard that moves in one round of `chunk` elements.
  Range chunk(int index, std::size_t round, std::size_t chunk) const {
    const Range whole = shard(index);
    const std::size_t skip = std::min(round * chunk, whole.count);
    return {whole.begin + skip, std::min(chunk, whole.count - skip)};
  }
  std::size_t rounds(std::size_t chunk) const { return ceil_div(length_, chunk); }

  static std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
  static std::size_t round_up(std::size_t a, std::size_t to) { return ceil_div(a, to) * to; }

 private:
  Range clip(std::size_t begin, std::size_t count) const {
    begin = std::min(begin, total_);
    return {begin, std::min(count, total_ - begin)};
  }
  std::size_t total_, length_;
};
}  // namespace sdp
