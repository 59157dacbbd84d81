// float16 and bfloat16 to float32 and back, over all bit patterns, as IEEE 754 defines it. The
// processor's own instructions take blocks of eight, our code takes what is left: both are tested.
#include <cmath>
#include <limits>

#include "check.hpp"
#include "reference.hpp"

using namespace sdp;
using reference::Format;

namespace {
struct Type {
  DType dtype;
  Format format;
};
constexpr Type kTypes[] = {{DType::float16, reference::kFloat16},
                           {DType::bfloat16, reference::kBfloat16}};

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `at_once`: how many a kernel gets in one call.
std::vector<float> widen(KernelTable table, DType dtype, const std::vector<std::uint16_t>& in,
                         std::size_t at_once) {
  std::vector<float> out(in.size());
  const Kernel kernel = table(dtype, ReduceOp::sum);
  for (std::size_t i = 0; i < in.size(); i += at_once) {
    kernel.load(&out[i], &in[i], std::min(at_once, in.size() - i), 1.0);
  }
  return out;
}

std::vector<std::uint16_t> narrow(KernelTable table, DType dtype, const std::vector<float>& in,
                                  std::size_t at_once) {
  std::vector<std::uint16_t> out(in.size());
  const Kernel kernel = table(dtype, ReduceOp::sum);
  for (std::size_t i = 0; i < in.size(); i += at_once) {
    kernel.store(&out[i], &in[i], std::min(at_once, in.size() - i), 1);
  }
  return out;
}

template <class Body>  // body(table, type, at_once)
void for_all_ways(Body&& body) {
  for (const auto& table : reference::tables()) {
    for (const Type& type : kTypes) {
      for (std::size_t at_once : {1, 4096}) body(table.kernels, type, at_once);
    }
  }
}

std::vector<std::uint16_t> all_patterns() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

// A NaN stays one: the sign and the upper bits of its payload, made quiet.
std::uint16_t narrow_nan(Format format, std::uint32_t bits) {
  const std::uint32_t sign = bits >> 16 & 0x8000;
  const std::uint32_t payload = (bits & 0x7fffff) >> (23 - format.mantissa_bits);
  const std::uint32_t exponent = static_cast<std::uint32_t>(2 * format.bias + 1);
  const std::uint32_t quiet = 1u << (format.mantissa_bits - 1);
  return static_cast<std::uint16_t>(sign | exponent << format.mantissa_bits | quiet | payload);
}

std::uint16_t expected_narrow(Format format, float value) {
  return std::isnan(value) ? narrow_nan(format, bits_of(value)) : reference::encode(format, value);
}

void check_narrow(Format format, const std::vector<float>& in,
                  const std::vector<std::uint16_t>& out) {
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (out[i] == expected_narrow(format, in[i])) continue;
    check::fail(__FILE__, __LINE__,
                "narrow " + check::show(in[i]) + " -> " + std::to_string(out[i]) + ", not " +
                    std::to_string(expected_narrow(format, in[i])));
  }
}
}  // namespace

TEST(the_reference_knows_well_known_numbers) {
  CHECK_EQ(reference::decode(reference::kFloat16, 0x3c00), 1.0);
  CHECK_EQ(reference::decode(reference::kFloat16, 0x7bff), 65504.0);
  CHECK_EQ(reference::decode(reference::kFloat16, 0x0001), std::ldexp(1.0, -24));
  CHECK_EQ(reference::decode(reference::kBfloat16, 0xc049), -3.140625);
  CHECK_EQ(reference::encode(reference::kFloat16, 65519.0), 0x7bff);
  CHECK_EQ(reference::encode(reference::kFloat16, 65520.0), 0x7c00);
  CHECK_EQ(reference::encode(reference::kFloat16, std::ldexp(1.0, -25)), 0x0000);
  CHECK_EQ(reference::encode(reference::kFloat16, std::ldexp(1.1, -25)), 0x0001);
  CHECK_EQ(reference::encode(reference::kBfloat16, 3.14159), 0x4049);
  for (std::uint16_t bits : all_patterns()) {
    for (const Type& type : kTypes) {
      if (reference::is_nan(type.format, bits)) continue;
      CHECK_EQ(reference::encode(type.format, reference::decode(type.format, bits)), bits);
    }
  }
}

TEST(every_pattern_widens_exactly) {
  const auto patterns = all_patterns();
  for_all_ways([&](KernelTable table, const Type& type, std::size_t at_once) {
    const auto wide = widen(table, type.dtype, patterns, at_once);
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      const double expected = reference::decode(type.format, patterns[i]);
      if (std::isnan(expected)) {
        CHECK(std::isnan(wide[i]));
        CHECK_EQ(std::signbit(wide[i]), (patterns[i] & 0x8000) != 0);
      } else {
        CHECK_EQ(bits_of(wide[i]), bits_of(static_cast<float>(expected)));
      }
    }
  });
}

TEST(every_pattern_survives_there_and_back) {
  const auto patterns = all_patterns();
  for_all_ways([&](KernelTable table, const Type& type, std::size_t at_once) {
    const auto back =
        narrow(table, type.dtype, widen(table, type.dtype, patterns, at_once), at_once);
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      const bool nan = reference::is_nan(type.format, patterns[i]);
      const int quiet = nan ? 1 << (type.format.mantissa_bits - 1) : 0;
      CHECK_EQ(back[i], patterns[i] | quiet);
    }
  });
}

// Around every representable number: itself, the middle to the next one, and a hair to either side.
TEST(narrowing_rounds_to_nearest_even_everywhere) {
  for (const Type& type : kTypes) {
    std::vector<float> in;
    for (std::uint16_t bits : all_patterns()) {
      const double here = reference::decode(type.format, bits);
      const double next = reference::decode(type.format, static_cast<std::uint16_t>(bits + 1));
      if (!std::isfinite(here)) continue;
      // Past the largest number, infinity stands where the next one would.
      const double step =
          std::isfinite(next)
              ? next - here
              : here - reference::decode(type.format, static_cast<std::uint16_t>(bits - 1));
      for (double value : {here, here + step / 2, here + step / 4}) {
        const auto exact = static_cast<float>(value);
        for (float side : {-HUGE_VALF, HUGE_VALF}) in.push_back(std::nextafterf(exact, side));
        in.push_back(exact);
      }
    }
    for (const auto& table : reference::tables()) {
      for (std::size_t at_once : {1, 4096}) {
        check_narrow(type.format, in, narrow(table.kernels, type.dtype, in, at_once));
      }
    }
  }
}

TEST(narrowing_overflows_to_infinity_and_keeps_nan) {
  std::vector<float> in{0.0f,       -0.0f,    HUGE_VALF,
                        -HUGE_VALF, 1e-45f,   -1e-45f,
                        1e38f,      3.4e38f,  std::numeric_limits<float>::max(),
                        65519.996f, 65520.0f, 65536.0f};
  for (std::uint32_t payload = 1; payload < 0x800000; payload = payload * 2 + payload % 7) {
    in.push_back(float_of(0x7f800000 | payload));
    in.push_back(float_of(0xff800000 | payload));
  }
  in.push_back(float_of(0x7fffffff));
  for_all_ways([&](KernelTable table, const Type& type, std::size_t at_once) {
    check_narrow(type.format, in, narrow(table, type.dtype, in, at_once));
  });
}

// Every 997th of all floats, a prime's stride apart so that all low bits occur.
TEST(all_tables_narrow_alike) {
  const auto tables = reference::tables();
  std::vector<float> in;
  for (std::uint64_t bits = 0; bits < 1ull << 32; bits += 997) {
    in.push_back(float_of(static_cast<std::uint32_t>(bits)));
  }
  for (const Type& type : kTypes) {
    const auto first = narrow(tables[0].kernels, type.dtype, in, in.size());
    for (const auto& table : tables) {
      CHECK(narrow(table.kernels, type.dtype, in, in.size()) == first);
    }
    for (std::size_t i = 0; i < in.size(); i += 101) {
      CHECK_EQ(first[i], expected_narrow(type.format, in[i]));
    }
  }
}
