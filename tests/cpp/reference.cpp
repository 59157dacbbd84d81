#include "reference.hpp"

#include <array>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>

namespace reference {
using sdp::DType;
using sdp::ReduceOp;

double decode(Format format, std::uint16_t bits) {
  const int exponent_mask = 2 * format.bias + 1;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits >> format.mantissa_bits) & exponent_mask;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == exponent_mask) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  const int hidden = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(hidden + mantissa, scale);
}

std::uint16_t encode(Format format, double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (2 * format.bias + 1) << format.mantissa_bits;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
  const int smallest = 1 - format.bias;  // exponent of the smallest normal number
  const int exponent = magnitude == 0 ? smallest : std::max(smallest, std::ilogb(magnitude));
  // In units of the last place; a carry out of the mantissa goes on into the exponent by itself.
  const double units = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const int bits = ((exponent - smallest) << format.mantissa_bits) + static_cast<int>(units);
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

bool is_nan(Format format, std::uint16_t bits) {
  return std::isnan(decode(format, bits));
}

bool defined(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float32:
    case DType::float64:
      return !bitwise;
    case DType::complex64:
    case DType::complex128:
      return !bitwise && !ordered;
    case DType::boolean:
      return op != ReduceOp::avg && op != ReduceOp::premul_sum;
    default:
      return op != ReduceOp::premul_sum;
  }
}

namespace {
// ((0 1) (2 3)) 4: the left half is the largest power of two below the whole.
template <class T, class Fold>
T tree(std::span<const T> values, const Fold& fold) {
  if (values.size() == 1) return values[0];
  std::size_t half = 1;
  while (half * 2 < values.size()) half *= 2;
  return fold(tree(values.first(half), fold), tree(values.subspan(half), fold));
}

template <class T>
T minimum(T a, T b) {
  if (a != a) return a;
  if (b != b) return b;
  return a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  if (a != a) return a;
  if (b != b) return b;
  return a > b ? a : b;
}

template <class T>
T real(ReduceOp op, std::span<T> values, const std::vector<double>& factors) {
  const auto fold = [&](T a, T b) -> T {
    if (op == ReduceOp::product) return a * b;
    if (op == ReduceOp::min) return minimum(a, b);
    if (op == ReduceOp::max) return maximum(a, b);
    return a + b;
  };
  if (op == ReduceOp::premul_sum) {
    for (std::size_t s = 0; s < values.size(); ++s) values[s] *= static_cast<T>(factors[s]);
  }
  const T result = tree<T>(values, fold);
  return op == ReduceOp::avg ? result / static_cast<T>(values.size()) : result;
}

template <class T>
std::complex<T> complex(ReduceOp op, std::span<std::complex<T>> values,
                        const std::vector<double>& factors) {
  using C = std::complex<T>;
  const auto fold = [&](C a, C b) -> C {
    if (op != ReduceOp::product) return {a.real() + b.real(), a.imag() + b.imag()};
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  };
  if (op == ReduceOp::premul_sum) {
    for (std::size_t s = 0; s < values.size(); ++s) {
      const T factor = static_cast<T>(factors[s]);
      values[s] = {values[s].real() * factor, values[s].imag() * factor};
    }
  }
  const C result = tree<C>(values, fold);
  const T n = static_cast<T>(values.size());
  return op == ReduceOp::avg ? C{result.real() / n, result.imag() / n} : result;
}

std::uint16_t half(Format format, ReduceOp op, std::span<const std::uint16_t> bits,
                   const std::vector<double>& factors) {
  std::array<float, 16> values{};
  for (std::size_t s = 0; s < bits.size(); ++s) {
    values.at(s) = static_cast<float>(decode(format, bits[s]));
  }
  const float result = real(op, std::span(values).first(bits.size()), factors);
  if (std::isnan(result)) return 0x7fff;  // some NaN
  return encode(format, result);
}

template <class T>
T integer(ReduceOp op, std::span<const T> values) {
  using Wide = __int128;
  Wide result = values[0];
  for (std::size_t s = 1; s < values.size(); ++s) {
    const Wide next = values[s];
    switch (op) {
      case ReduceOp::product:  // modulo 2^64 is enough for every type
        result = static_cast<std::uint64_t>(result) * static_cast<std::uint64_t>(next);
        break;
      case ReduceOp::min:
        result = std::min(result, next);
        break;
      case ReduceOp::max:
        result = std::max(result, next);
        break;
      case ReduceOp::band:
        result &= next;
        break;
      case ReduceOp::bor:
        result |= next;
        break;
      case ReduceOp::bxor:
        result ^= next;
        break;
      default:
        result += next;
    }
  }
  if (op != ReduceOp::avg) return static_cast<T>(result);
  return static_cast<T>(static_cast<std::int64_t>(result) /  // toward zero
                        static_cast<std::int64_t>(values.size()));
}

std::uint8_t logical(ReduceOp op, std::span<const std::uint8_t> values) {
  std::size_t n_true = 0;
  for (std::uint8_t value : values) n_true += value != 0 ? 1 : 0;
  switch (op) {
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return n_true == values.size();
    case ReduceOp::bxor:
      return n_true % 2;
    default:
      return n_true > 0;
  }
}

template <class T, class One>
Bytes each_element(const std::vector<Bytes>& sources, const One& one) {
  Bytes result(sources[0].size());
  std::vector<T> values(sources.size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(T)) {
    for (std::size_t s = 0; s < sources.size(); ++s) {
      std::memcpy(&values[s], sources[s].data() + at, sizeof(T));
    }
    const T reduced = one(std::span(values));
    std::memcpy(result.data() + at, &reduced, sizeof(T));
  }
  return result;
}
}  // namespace

Bytes reduce(DType dtype, ReduceOp op, const std::vector<Bytes>& sources,
             const std::vector<double>& factors) {
  const auto integers = [&]<class T>(T) {
    return each_element<T>(sources, [&](std::span<T> values) { return integer<T>(op, values); });
  };
  const auto reals = [&]<class T>(T) {
    return each_element<T>(sources, [&](auto values) { return real(op, values, factors); });
  };
  const auto complexes = [&]<class T>(T) {
    return each_element<std::complex<T>>(
        sources, [&](auto values) { return complex<T>(op, values, factors); });
  };
  const auto halves = [&](Format format) {
    return each_element<std::uint16_t>(
        sources, [&](auto values) { return half(format, op, values, factors); });
  };
  switch (dtype) {
    case DType::float16:
      return halves(kFloat16);
    case DType::bfloat16:
      return halves(kBfloat16);
    case DType::float32:
      return reals(float{});
    case DType::float64:
      return reals(double{});
    case DType::complex64:
      return complexes(float{});
    case DType::complex128:
      return complexes(double{});
    case DType::int8:
      return integers(std::int8_t{});
    case DType::int16:
      return integers(std::int16_t{});
    case DType::int32:
      return integers(std::int32_t{});
    case DType::int64:
      return integers(std::int64_t{});
    case DType::uint8:
      return integers(std::uint8_t{});
    case DType::boolean:
      return each_element<std::uint8_t>(sources, [&](auto values) { return logical(op, values); });
  }
  throw std::logic_error("no such type");
}

namespace {
template <class T>
T special(std::uint32_t which) {
  using Limits = std::numeric_limits<T>;
  const T all[] = {T(0),
                   -T(0),
                   T(1),
                   -T(1),
                   Limits::infinity(),
                   -Limits::infinity(),
                   Limits::quiet_NaN(),
                   Limits::max(),
                   Limits::lowest(),
                   Limits::min(),
                   Limits::denorm_min(),
                   T(3)};
  return all[which % std::size(all)];
}

// Numbers of similar size (sums round), any numbers (sums absorb), and special ones.
template <class T>
Bytes sample_reals(std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * sizeof(T));
  std::uniform_real_distribution<T> near(-4, 4);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bits = random();
    T value = near(random);
    if (bits % 8 == 0) value = special<T>(static_cast<std::uint32_t>(bits >> 8));
    if (bits % 8 == 1) std::memcpy(&value, &bits, sizeof value);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof value);
  }
  return bytes;
}

Bytes sample_halves(Format format, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * 2);
  std::uniform_real_distribution<double> near(-4, 4);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t any = random();
    const auto bits =
        any % 2 == 0 ? encode(format, near(random)) : static_cast<std::uint16_t>(any >> 8);
    std::memcpy(bytes.data() + i * 2, &bits, 2);
  }
  return bytes;
}

// Random bytes, but now and then the same byte again and again: 0, -1, extremes.
Bytes sample_bytes(std::size_t nbytes, std::size_t item, std::mt19937_64& random) {
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; i += item) {
    const std::uint64_t any = random();
    for (std::size_t b = 0; b < item; ++b) {
      bytes[i + b] = static_cast<std::byte>(any % 4 == 0 ? (any >> 2) % 2 * 0xff : any >> 8 * b);
    }
    if (any % 16 == 0) bytes[i + item - 1] ^= std::byte{0x80};
  }
  return bytes;
}

template <class T>
bool same_reals(const Bytes& a, const Bytes& b) {
  for (std::size_t at = 0; at < a.size(); at += sizeof(T)) {
    T x, y;
    std::memcpy(&x, a.data() + at, sizeof(T));
    std::memcpy(&y, b.data() + at, sizeof(T));
    if (std::isnan(x) && std::isnan(y)) continue;
    if (std::memcmp(&x, &y, sizeof(T)) != 0) return false;
  }
  return true;
}

bool same_halves(Format format, const Bytes& a, const Bytes& b) {
  for (std::size_t at = 0; at < a.size(); at += 2) {
    std::uint16_t x, y;
    std::memcpy(&x, a.data() + at, 2);
    std::memcpy(&y, b.data() + at, 2);
    if (x != y && !(is_nan(format, x) && is_nan(format, y))) return false;
  }
  return true;
}
}  // namespace

Bytes sample(DType dtype, std::size_t count, std::uint32_t seed) {
  std::mt19937_64 random(seed);
  switch (dtype) {
    case DType::float16:
      return sample_halves(kFloat16, count, random);
    case DType::bfloat16:
      return sample_halves(kBfloat16, count, random);
    case DType::float32:
      return sample_reals<float>(count, random);
    case DType::float64:
      return sample_reals<double>(count, random);
    case DType::complex64:
      return sample_reals<float>(2 * count, random);
    case DType::complex128:
      return sample_reals<double>(2 * count, random);
    default:
      return sample_bytes(count * sdp::itemsize(dtype), sdp::itemsize(dtype), random);
  }
}

bool same(DType dtype, const Bytes& a, const Bytes& b) {
  if (a.size() != b.size()) return false;
  switch (dtype) {
    case DType::float16:
      return same_halves(kFloat16, a, b);
    case DType::bfloat16:
      return same_halves(kBfloat16, a, b);
    case DType::float32:
    case DType::complex64:
      return same_reals<float>(a, b);
    case DType::float64:
    case DType::complex128:
      return same_reals<double>(a, b);
    default:
      return a == b;
  }
}

std::vector<Table> tables() {
  std::vector<Table> all{{"baseline", sdp::kernel_baseline, sdp::blocks_baseline}};
#if defined(__x86_64__)
  const bool has_avx512 = sdp::best_kernels() == sdp::kernel_avx512;
  if (has_avx512) all.push_back({"avx512", sdp::kernel_avx512, sdp::blocks_avx512});
  if (has_avx512 || sdp::best_kernels() == sdp::kernel_avx2) {
    all.push_back({"avx2", sdp::kernel_avx2, sdp::blocks_avx2});
  }
#endif
  return all;
}
}  // namespace reference
