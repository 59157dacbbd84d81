// Blocks of pages, against a list of who owns each page.
#include <algorithm>
#include <map>
#include <random>

#include "check.hpp"
#include "preload/page_blocks.hpp"

using sdp::PageBlocks;

namespace {
constexpr std::size_t kPages = 96;

struct Pages {
  std::vector<std::uint32_t> entries = std::vector<std::uint32_t>(kPages);
  PageBlocks blocks{entries.data(), kPages};
  std::vector<bool> used = std::vector<bool>(kPages);
  std::map<std::size_t, std::size_t> owned;  // lengths of blocks, by first page

  // The place that first fit has to find.
  std::size_t expected(std::size_t pages, std::size_t alignment) const {
    for (std::size_t at = 0; at + pages <= kPages; at += alignment) {
      const auto first = used.begin() + static_cast<std::ptrdiff_t>(at);
      const auto last = first + static_cast<std::ptrdiff_t>(pages);
      if (std::find(first, last, true) == last) return at;
    }
    return PageBlocks::kNone;
  }
  void mark(std::size_t first, std::size_t pages, bool in_use) {
    for (std::size_t i = 0; i < pages; ++i) used[first + i] = in_use;
  }
  void take(std::size_t pages, std::size_t alignment) {
    const std::size_t first = blocks.take(pages, alignment);
    CHECK_EQ(first, expected(pages, alignment));
    if (first == PageBlocks::kNone) return;
    CHECK_EQ(blocks.length(first), pages);
    mark(first, pages, true);
    owned[first] = pages;
  }
  void give(std::size_t index) {
    const auto block = std::next(owned.begin(), static_cast<std::ptrdiff_t>(index));
    CHECK_EQ(blocks.length(block->first), block->second);
    CHECK(blocks.used(block->first));
    blocks.give(block->first);
    CHECK(!blocks.used(block->first));
    mark(block->first, block->second, false);
    owned.erase(block);
  }
};
}  // namespace

TEST(random_blocks_lie_where_first_fit_puts_them) {
  std::mt19937 random(7);
  for (int program = 0; program < 300; ++program) {
    Pages pages;
    for (int step = 0; step < 300; ++step) {
      if (random() % 2 == 0 && !pages.owned.empty()) {
        pages.give(random() % pages.owned.size());
      } else {
        pages.take(1 + random() % 24, std::size_t{1} << random() % 5);
      }
    }
    while (!pages.owned.empty()) pages.give(random() % pages.owned.size());
    pages.take(kPages, 1);  // all free pages are one block again
    CHECK_EQ(pages.owned.size(), std::size_t{1});
  }
}
