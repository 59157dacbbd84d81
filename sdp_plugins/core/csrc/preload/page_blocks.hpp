// Blocks of whole pages within a range of memory.
//
// First fit, in an implicit list: each block knows its length, so the next one follows it; free
// neighbours are joined when a search meets them (Knuth, The Art of Computer Programming 1, 2.5).
// Freeing takes one step, and an allocation as many as there are blocks between the first free one
// and its own: a millisecond for tens of thousands.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sdp {

// Not for several threads at a time. Needs no C++ library at run time.
class PageBlocks {
 public:
  static constexpr std::size_t kNone = ~std::size_t{0};

  PageBlocks() = default;
  // `entries` has one for each of 1 to 2^31 - 1 pages; it stays the caller's.
  PageBlocks(std::uint32_t* entries, std::size_t pages) : entries_(entries), pages_(pages) {
    set(0, pages, false);
  }

  // Returns the first page of a new block, a multiple of `alignment` pages; kNone if none fits.
  std::size_t take(std::size_t pages, std::size_t alignment) {
    for (std::size_t at = lowest_free_; at < pages_; at += length(at)) {
      if (used(at)) {
        if (at == lowest_free_) lowest_free_ += length(at);
        continue;
      }
      join_free_neighbours(at);
      const std::size_t end = at + length(at);
      const std::size_t begin = (at + alignment - 1) / alignment * alignment;
      if (begin >= end || pages > end - begin) continue;
      if (begin > at) set(at, begin - at, false);
      set(begin, pages, true);
      if (begin + pages < end) set(begin + pages, end - begin - pages, false);
      return begin;
    }
    return kNone;
  }

  // Frees a block by its first page.
  void give(std::size_t first) {
    set(first, length(first), false);
    if (first < lowest_free_) lowest_free_ = first;
  }

  // The number of pages of a block, by its first page.
  std::size_t length(std::size_t first) const { return entries_[first] >> 1; }
  // Whether it is one that `take` has returned and `give` has not freed.
  bool used(std::size_t first) const { return (entries_[first] & 1) != 0; }

 private:
  void set(std::size_t first, std::size_t pages, bool used) {
    entries_[first] = static_cast<std::uint32_t>(pages << 1 | (used ? 1 : 0));
  }
  void join_free_neighbours(std::size_t at) {
    for (std::size_t next = at + length(at); next < pages_ && !used(next); next = at + length(at)) {
      set(at, length(at) + length(next), false);
    }
  }

  // At the first page of a block: its number of pages, doubled, plus whether it is used.
  std::uint32_t* entries_ = nullptr;
  std::size_t pages_ = 0;
  std::size_t lowest_free_ = 0;  // all blocks before this one are used
};
}  // namespace sdp
