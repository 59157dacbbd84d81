// Element types that C++ lacks, and their conversions; included by kernels.inl, whose rules hold.
#include <stdint.h>
#include <string.h>

namespace sdp {
namespace {

struct half {
  uint16_t bits;
};
struct bfloat {
  uint16_t bits;
};
struct boolean {
  uint8_t value;
};
template <class T>
struct complex {
  T re, im;
};

inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(bfloat x) {
  return as_float(uint32_t{x.bits} << 16);
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline bfloat narrow_bfloat(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded)};
}

#if defined(__aarch64__)
inline float widen(half x) {
  __fp16 value;
  memcpy(&value, &x, sizeof value);
  return value;
}
inline half narrow_half(float x) {
  const __fp16 value = x;
  half bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
#else
// Has no branches, so that the compiler can vectorize. A multiplication by a power of two re-biases
// the exponent and also normalizes subnormal numbers exactly.
inline float widen(half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const float scaled = as_float(magnitude << 13) * as_float(0x77800000);  // 2^112
  const uint32_t finite = as_bits(scaled);
  const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  return as_float((magnitude >= 0x7c00u ? special : finite) | sign);
}
inline half narrow_half(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: drop 13 bits of mantissa, ties to even. 0xc8000000 re-biases the exponent.
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results: adding 0.5 lets the adder itself round at the right bit.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;            // rounds past 65504
  result = magnitude > 0x7f800000u ? nan : result;
  return {static_cast<uint16_t>(result | sign)};
}
#endif
}  // namespace
}  // namespace sdp
