// Blocks of 8-bit and 4-bit numbers: what rounding may change, and what it must leave alone.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "check.hpp"
#include "reference.hpp"

using namespace sdp;
using Floats = std::vector<float>;
using Packed = std::vector<std::byte>;

namespace {
constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr BlockFormat kFormats[] = {BlockFormat::int8, BlockFormat::fp8, BlockFormat::int4};
constexpr std::size_t kSizes[] = {0, 1, 7, 255, 256, 257, 1000, 4096};

Packed pack(BlockFormat format, const BlockKernels& kernels, const Floats& values,
            Rounding how = {}, Floats* residual = nullptr) {
  Packed blocks(blocks_nbytes(format, values.size()));
  kernels.pack(blocks.data(), values.data(), residual == nullptr ? nullptr : residual->data(),
               values.size(), how);
  return blocks;
}

Floats unpack(const BlockKernels& kernels, const Packed& blocks, std::size_t n) {
  Floats values(n);
  kernels.unpack(values.data(), blocks.data(), n);
  return values;
}

// Of both signs, and of sizes from 2^low to 2^high.
Floats spread(std::size_t n, std::uint32_t seed, float low = -12, float high = 3) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> exponent(low, high);
  Floats values(n);
  for (float& value : values) {
    value = std::exp2(exponent(generator)) * (generator() % 2 == 0 ? 1.0F : -1.0F);
  }
  return values;
}

float largest_near(const Floats& values, std::size_t i) {
  float most = 0;
  const std::size_t begin = i / kBlock * kBlock;
  for (std::size_t k = begin; k < std::min(begin + kBlock, values.size()); ++k) {
    if (std::isfinite(values[k])) most = std::max(most, std::fabs(values[k]));
  }
  return most;
}

double bound(BlockFormat format, float value, float most) {
  const double rounding = most * 0x1p-21;
  if (format == BlockFormat::int8) return most / 252.0 + rounding;
  if (format == BlockFormat::int4) return most / 12.0 + rounding;
  return std::max(std::fabs(value) / 16.0, most / 425984.0) + rounding;
}

template <class Body>  // body(format, kernels)
void for_all(Body&& body) {
  for (const auto& table : reference::tables()) {
    for (const BlockFormat format : kFormats) {
      body(format, table.blocks(format));
    }
  }
}
}  // namespace

TEST(values_change_by_no_more_than_the_bound) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    for (const std::size_t n : kSizes) {
      for (const auto& [low, high] :
           {std::pair{-12.0F, 3.0F}, {-100.0F, -90.0F}, {120.0F, 127.9F}}) {
        const Floats values = spread(n, 1, low, high);
        const Floats found = unpack(kernels, pack(format, kernels, values), n);
        for (std::size_t i = 0; i < n; ++i) {
          const double error = std::fabs(static_cast<double>(found[i]) - values[i]);
          CHECK(error <= bound(format, values[i], largest_near(values, i)));
        }
      }
    }
  });
}

TEST(the_largest_floats_stay_finite) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    for (float value = kMax; value > kMax * (1 - 0x1p-16F); value = std::nextafter(value, 0.0F)) {
      for (const bool stochastic : {false, true}) {
        const float found = unpack(kernels, pack(format, kernels, {value}, {stochastic, 5}), 1)[0];
        CHECK(std::isfinite(found) && std::fabs(found - value) <= value * 0x1p-22F);
      }
    }
  });
}

TEST(zeros_stay_zeros_and_tiny_values_become_zeros) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    const Floats values{0.0F, -0.0F, 0x1p-101F, -0x1p-149F};
    for (const float found : unpack(kernels, pack(format, kernels, values), 4))
      CHECK_EQ(found, 0.0F);
  });
}

TEST(what_is_not_finite_arrives_as_such_and_spoils_no_other_value) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    for (const std::size_t n : {3U, 300U}) {
      Floats values = spread(n, 2);
      values[0] = kInfinite;
      values[1] = -kInfinite;
      const std::uint32_t all_ones = 0x7fffffff;  // a NaN, too
      std::memcpy(&values[2], &all_ones, sizeof all_ones);
      for (const bool stochastic : {false, true}) {
        Floats residual(n, 0.0F);
        const Packed blocks = pack(format, kernels, values, {stochastic, 9}, &residual);
        const Floats found = unpack(kernels, blocks, n);
        CHECK(found[0] == kInfinite && found[1] == -kInfinite && std::isnan(found[2]));
        CHECK(residual[0] == 0 && residual[1] == 0 && residual[2] == 0);
        for (std::size_t i = 3; i < n; ++i) {
          const double allowed =
              (stochastic ? 2 : 1) * bound(format, values[i], largest_near(values, i));
          CHECK(std::fabs(static_cast<double>(found[i]) - values[i]) <= allowed);
        }
      }
    }
  });
}

TEST(all_kernels_give_the_same_bytes) {
  for (const BlockFormat format : kFormats) {
    for (const std::size_t n : kSizes) {
      Floats values = spread(n, 3);
      if (n > 600) values[600] = kInfinite;
      for (const bool stochastic : {false, true}) {
        Floats expected_residual(n, 0.01F);
        const Packed expected =
            pack(format, blocks_baseline(format), values, {stochastic, 11}, &expected_residual);
        for (const auto& table : reference::tables()) {
          Floats residual(n, 0.01F);
          CHECK(pack(format, table.blocks(format), values, {stochastic, 11}, &residual) ==
                expected);
          CHECK(residual == expected_residual);
          Floats whole = unpack(blocks_baseline(format), expected, n);
          const Floats found = unpack(table.blocks(format), expected, n);
          CHECK(n == 0 || std::memcmp(whole.data(), found.data(), n * sizeof(float)) == 0);
        }
      }
    }
  }
}

// Every byte is rounded to itself: the block's largest number sets the scale to 1.
TEST(numbers_that_a_byte_stands_for_are_exact) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    const float most = format == BlockFormat::int8   ? 126.0F
                       : format == BlockFormat::int4 ? 6.0F
                                                     : 416.0F;
    for (int byte = 0; byte < 256; ++byte) {
      Packed blocks(blocks_nbytes(format, 1));
      const float one = 1.0F;
      std::memcpy(blocks.data(), &one, sizeof one);
      blocks[sizeof one] = static_cast<std::byte>(byte);
      const float value = unpack(kernels, blocks, 1)[0];
      if (!std::isfinite(value)) continue;
      CHECK(std::fabs(value) <= most);
      for (const bool stochastic : {false, true}) {
        const Floats both{most, value};
        const Floats found = unpack(kernels, pack(format, kernels, both, {stochastic, 3}), 2);
        // Noise may move a number that lies a hair beside its neighbour.
        const float gap = most / (format == BlockFormat::int4 ? 5.9F : 13.0F);
        CHECK(found[1] == value || (stochastic && std::fabs(found[1] - value) <= gap));
      }
    }
  });
}

TEST(stochastic_rounding_gives_a_neighbour_and_the_value_in_the_mean) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    constexpr int kTimes = 4000;
    const Floats values{1.0F, 0.3F, -0.7F, 0.0101F, -1e-4F, 0.0F};
    std::vector<double> sums(values.size());
    for (std::uint32_t seed = 0; seed < kTimes; ++seed) {
      const Floats found =
          unpack(kernels, pack(format, kernels, values, {true, seed}), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double error = std::fabs(static_cast<double>(found[i]) - values[i]);
        CHECK(error <= 2 * bound(format, values[i], 1.0F));
        sums[i] += found[i];
      }
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double most = 2 * bound(format, values[i], 1.0F);  // a deviation of half of it
      CHECK(std::fabs(sums[i] / kTimes - values[i]) <= 5 * most / 2 / std::sqrt(kTimes));
    }
  });
}

TEST(a_residual_is_what_was_left_out_so_that_nothing_is_lost) {
  for_all([](BlockFormat format, const BlockKernels& kernels) {
    const std::size_t n = 700;
    const Floats values = spread(n, 4);
    Floats residual(n, 0.0F);
    std::vector<double> sent(n);
    for (int step = 1; step <= 50; ++step) {
      const Floats found = unpack(kernels, pack(format, kernels, values, {}, &residual), n);
      for (std::size_t i = 0; i < n; ++i) {
        sent[i] += found[i];
        const double missing = static_cast<double>(step) * values[i] - sent[i];
        CHECK(std::fabs(missing - residual[i]) <= 1e-5 * step * largest_near(values, i));
      }
    }
  });
}
