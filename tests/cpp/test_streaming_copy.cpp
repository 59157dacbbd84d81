// Copies past the caches write what memcpy writes, and nothing beside it.
#include <algorithm>
#include <vector>

#include "check.hpp"
#include "streaming_copy.hpp"

using namespace sdp;

TEST(every_length_and_alignment_is_copied_exactly) {
  constexpr std::size_t kMargin = 64;
  constexpr std::byte kUntouched{0xEE};
  std::vector<std::byte> source(1000);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + 1);
  for (std::size_t from : {0, 1, 17}) {
    for (std::size_t to = 0; to < 64; to += 3) {
      for (std::size_t n : {0, 1, 15, 63, 64, 65, 127, 128, 500, 900}) {
        std::vector<std::byte> target(to + n + 2 * kMargin, kUntouched);
        const auto begin = target.begin() + static_cast<std::ptrdiff_t>(kMargin + to);
        streaming_copy(&target[kMargin + to], &source[from], n);
        CHECK(std::equal(begin, begin + static_cast<std::ptrdiff_t>(n),
                         source.begin() + static_cast<std::ptrdiff_t>(from)));
        const auto untouched = std::count(target.begin(), target.end(), kUntouched);
        const auto equal =
            std::count(source.begin() + static_cast<std::ptrdiff_t>(from),
                       source.begin() + static_cast<std::ptrdiff_t>(from + n), kUntouched);
        CHECK_EQ(untouched - equal, static_cast<std::ptrdiff_t>(to + 2 * kMargin));
      }
    }
  }
}
