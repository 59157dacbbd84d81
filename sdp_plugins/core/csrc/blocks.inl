// Included at the end of kernels.inl, whose rules hold; SDP_BLOCKS is the name of the
// function to define. Without branches, so that the compiler can vectorize.
#include "blocks.hpp"

namespace sdp {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kTiny = 0x0d800000;  // 2^-100: a smaller scale could not be inverted
// 1.5 * 2^23: adding it rounds to an integer, and leaves this in the last byte.
constexpr float kToInteger = 12582912.0f;

inline int32_t signed_bits(float value) {
  return static_cast<int32_t>(as_bits(value));
}
inline float float_of(int32_t bits) {
  return as_float(static_cast<uint32_t>(bits));
}
inline int32_t magnitude(float value) {
  return signed_bits(value) & 0x7fffffff;
}
inline int32_t mask(bool is_true) {
  return -static_cast<int32_t>(is_true);
}
inline int32_t either(int32_t mask, int32_t a, int32_t b) {
  return (a & mask) | (b & ~mask);
}

// A hash of the value's index (Wellons, 2018: lowbias32).
inline uint32_t random_bits(uint32_t seed, uint32_t index) {
  uint32_t x = index * 0x9e3779b9u ^ seed;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
// Uniform in [-0.5, 0.5).
inline float noise(uint32_t random) {
  return as_float(0x3f800000u | (random >> 9)) - 1.5f;
}

template <int32_t kMax, bool kIsHalf>
struct Integer {
  static constexpr int32_t kLargest = kMax, kInfinity = kMax + 1, kNan = -kMax - 2;
  static constexpr float kMost = static_cast<float>(kMax);
  static constexpr bool kHalfByte = kIsHalf;

  template <bool kStochastic>
  static uint32_t encode(float value, uint32_t random) {
    return as_bits((kStochastic ? value + noise(random) : value) + kToInteger);
  }
  static int32_t special(int32_t is_nan, int32_t sign) {
    return either(is_nan, kNan, (kInfinity ^ sign) - sign);
  }
  static float decode(int32_t byte) {
    const int32_t sign = byte >> 31;
    const int32_t infinity = kInfinityBits | (sign & INT32_MIN);
    const int32_t not_finite = either(mask(byte == kNan), 0x7fc00000, infinity);
    const int32_t is_finite = mask((byte ^ sign) - sign <= kLargest);
    return float_of(either(is_finite, signed_bits(static_cast<float>(byte)), not_finite));
  }
};

using Int8 = Integer<126, false>;
using Int4 = Integer<6, true>;

// Four bits of exponent, three of mantissa, as the Open Compute Project's E4M3, but that 448 stands
// for infinity.
struct Fp8 {
  static constexpr int32_t kLargest = 0x7d, kInfinity = 0x7e, kNan = 0x7f;
  static constexpr float kMost = 416.0f;
  static constexpr bool kHalfByte = false;
  static constexpr int32_t kNormal = 0x3c800000;  // 2^-6
  static constexpr int32_t kBias = (127 - 7) << 3;

  // Rounds to an eighth of the power of two below, which is at least 2^-6: a number has 8 times the
  // steps by which that exceeds 2^-6, and the eighths. Like `kToInteger`, 1.5 * 2^20 times the
  // power leaves the eighths in the last byte, where minus the steps to 2^-6 are added beforehand.
  template <bool kStochastic>
  static uint32_t encode(float value, uint32_t random) {
    constexpr uint32_t kToEighths = (20 << 23) + (1 << 22) + (-(kNormal >> 20) & 0xff);
    const int32_t size = magnitude(value), below = size & kInfinityBits;
    // Unsigned: what is not finite, which `special` replaces, must not overflow.
    const auto power = static_cast<uint32_t>(below > kNormal ? below : kNormal);
    float exact = float_of(size);
    if constexpr (kStochastic) exact += noise(random) * as_float(power - (3 << 23));
    const uint32_t eighths = as_bits(exact + as_float(power + kToEighths));
    return (eighths + (power >> 20)) | (as_bits(value) >> 24 & 0x80);
  }
  static int32_t special(int32_t is_nan, int32_t sign) {
    return either(is_nan, kNan, kInfinity) | (sign & 0x80);
  }
  static float decode(int32_t byte) {
    const int32_t code = byte & 0x7f;
    const int32_t normal = (code + kBias) << 20;
    const int32_t subnormal = signed_bits(static_cast<float>(code) * (1.0f / 512.0f));
    const int32_t not_finite = either(mask(code == kNan), 0x7fc00000, kInfinityBits);
    const int32_t finite = either(mask(code < 8), subnormal, normal);
    const int32_t size = either(mask(code <= kLargest), finite, not_finite);
    return float_of(size | (byte << 24 & INT32_MIN));
  }
};

// The number is the last byte.
template <class Format, bool kStochastic, bool kFinite>
uint32_t number_of(float value, float inverse, uint32_t seed, uint32_t index) {
  const uint32_t random = kStochastic ? random_bits(seed, index) : 0;
  const uint32_t code = Format::template encode<kStochastic>(value * inverse, random);
  if constexpr (kFinite) return code;
  const int32_t size = magnitude(value), sign = signed_bits(value) >> 31;
  const int32_t special = Format::special(mask(size > kInfinityBits), sign);
  const int32_t number = either(mask(size < kInfinityBits), static_cast<int32_t>(code), special);
  return static_cast<uint32_t>(number);
}

// Two numbers' last bits in a byte. An odd number of them has room for a zero behind it.
void join(int8_t* bytes, uint32_t* numbers, size_t n) {
  const size_t half = (n + 1) / 2;
  if (n % 2 != 0) numbers[n] = 0;
  SDP_LOOP
  for (size_t i = 0; i < half; ++i) {
    bytes[i] = static_cast<int8_t>((numbers[i] & 15) | numbers[half + i] << 4);
  }
}
void split(int8_t* numbers, const int8_t* bytes, size_t n) {
  const size_t half = (n + 1) / 2;
  SDP_LOOP
  for (size_t i = 0; i < half; ++i) {
    numbers[i] = static_cast<int8_t>(static_cast<int8_t>(bytes[i] * 16) >> 4);
    numbers[half + i] = static_cast<int8_t>(bytes[i] >> 4);
  }
}

struct Block {
  Loose<float> scale;
  int8_t bytes[kBlock];
};
template <class Format>
constexpr size_t kBlockNbytes = sizeof(float) + kBlock / (Format::kHalfByte ? 2 : 1);

// The smaller `inverse` keeps each number, with any noise, within what rounds to the largest.
template <class Format, bool kStochastic, bool kFinite>
void pack_values(Block* block, const Loose<float>* in, Loose<float>* residual, size_t n,
                 int32_t most, uint32_t seed, uint32_t first) {
  const bool is_zero = most < kTiny;
  const float step = is_zero ? 1.0f : float_of(most) / Format::kMost;
  const float inverse = is_zero ? 0.0f : Format::kMost * (1.0f - 0x1p-22f) / float_of(most);
  block->scale.value = step;
  uint32_t numbers[kBlock];  // compilers run out of registers where the same loop narrows them
  SDP_LOOP
  for (size_t i = 0; i < n; ++i) {
    const uint32_t index = first + static_cast<uint32_t>(i);
    numbers[i] = number_of<Format, kStochastic, kFinite>(in[i].value, inverse, seed, index);
  }
  if constexpr (Format::kHalfByte) {
    join(block->bytes, numbers, n);
  } else {
    SDP_LOOP
    for (size_t i = 0; i < n; ++i) block->bytes[i] = static_cast<int8_t>(numbers[i]);
  }
  if (residual == nullptr) return;
  SDP_LOOP
  for (size_t i = 0; i < n; ++i) {
    const float left = in[i].value - Format::decode(static_cast<int8_t>(numbers[i])) * step;
    const int32_t is_finite = mask(magnitude(in[i].value) < kInfinityBits);
    residual[i].value = float_of(signed_bits(left) & is_finite);
  }
}

template <class Format, bool kStochastic>
void pack_block(Block* block, const Loose<float>* in, Loose<float>* residual, size_t n,
                uint32_t seed, uint32_t first) {
  Loose<float> sums[kBlock];
  if (residual != nullptr) {
    SDP_LOOP
    for (size_t i = 0; i < n; ++i) sums[i].value = in[i].value + residual[i].value;
    in = sums;
  }
  int32_t most = 0;
  SDP_LOOP
  for (size_t i = 0; i < n; ++i) {
    const int32_t size = magnitude(in[i].value);
    most = size > most ? size : most;
  }
  if (most < kInfinityBits) {
    pack_values<Format, kStochastic, true>(block, in, residual, n, most, seed, first);
    return;
  }
  most = 0;
  SDP_LOOP
  for (size_t i = 0; i < n; ++i) {
    const int32_t size = magnitude(in[i].value);
    const int32_t finite = size & mask(size < kInfinityBits);
    most = finite > most ? finite : most;
  }
  pack_values<Format, kStochastic, false>(block, in, residual, n, most, seed, first);
}

template <class Format>
void pack(void* blocks, const void* values, void* residual, size_t n, Rounding how) {
  auto* out = static_cast<std::byte*>(blocks);
  const auto* in = static_cast<const Loose<float>*>(values);
  auto* left = static_cast<Loose<float>*>(residual);
  const auto pack_one = how.stochastic ? pack_block<Format, true> : pack_block<Format, false>;
  for (size_t i = 0; i < n; i += kBlock, out += kBlockNbytes<Format>) {
    pack_one(reinterpret_cast<Block*>(out), in + i, left == nullptr ? nullptr : left + i,
             n - i < kBlock ? n - i : kBlock, how.seed, static_cast<uint32_t>(i));
  }
}

template <class Format>
void unpack(void* values, const void* blocks, size_t n) {
  const auto* from = static_cast<const std::byte*>(blocks);
  auto* to = static_cast<Loose<float>*>(values);
  for (size_t begin = 0; begin < n; begin += kBlock, from += kBlockNbytes<Format>) {
    const auto* block = reinterpret_cast<const Block*>(from);
    const float step = block->scale.value;
    const size_t count = n - begin < kBlock ? n - begin : kBlock;
    int8_t room[Format::kHalfByte ? kBlock : 1];
    if constexpr (Format::kHalfByte) split(room, block->bytes, count);
    const int8_t* numbers = Format::kHalfByte ? room : block->bytes;
    SDP_LOOP
    for (size_t i = 0; i < count; ++i) to[begin + i].value = Format::decode(numbers[i]) * step;
  }
}
}  // namespace

BlockKernels SDP_BLOCKS(BlockFormat format) {
  if (format == BlockFormat::fp8) return {pack<Fp8>, unpack<Fp8>};
  if (format == BlockFormat::int4) return {pack<Int4>, unpack<Int4>};
  return {pack<Int8>, unpack<Int8>};
}
}  // namespace sdp
