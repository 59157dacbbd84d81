// Numbers for tests of what a peer may have written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace malformed {
inline constexpr std::uint64_t kHuge = std::uint64_t{1} << 61;
inline constexpr std::uint64_t kMost = ~std::uint64_t{0};
inline constexpr std::size_t kLarge = 20'000;  // elements of 4 bytes that do not travel inline
}  // namespace malformed
