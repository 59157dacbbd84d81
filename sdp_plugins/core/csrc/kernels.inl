// Included by each kernels_*.cpp; SDP_KERNELS and SDP_BLOCKS name the functions to define. All code
// is in an anonymous namespace and uses no library templates, so that the linker cannot share a
// function that was compiled for a newer processor.
#include <stdint.h>

#include "kernel_elements.inl"
#include "kernels.hpp"

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sdp {
namespace {

// ---- accumulators
template <class T>
struct Plain {
  using Element = T;
  using Acc = T;
  static Acc in(T x) { return x; }
  static T out(Acc x) { return x; }
};
struct Half {
  using Element = half;
  using Acc = float;
  static float in(half x) { return widen(x); }
  static half out(float x) { return narrow_half(x); }
};
struct Bfloat {
  using Element = bfloat;
  using Acc = float;
  static float in(bfloat x) { return widen(x); }
  static bfloat out(float x) { return narrow_bfloat(x); }
};
// Any nonzero byte is true; stored values are 0 or 1.
struct Boolean {
  using Element = boolean;
  using Acc = uint8_t;
  static uint8_t in(boolean x) { return x.value != 0; }
  static boolean out(uint8_t x) { return {x}; }
};
// AVG of integers: the sum has 64 bits, so that it cannot overflow before the division.
template <class T>
struct Wide {
  using Element = T;
  using Acc = int64_t;
  static int64_t in(T x) { return x; }
  static T out(int64_t x) { return static_cast<T>(x); }
};

// ---- operators
template <class T>
struct is_integer {
  static constexpr bool value = static_cast<T>(0.5) == static_cast<T>(0);
};

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_integer<T>::value) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));  // wraps
    } else {
      return a + b;
    }
  }
  template <class T>
  static complex<T> apply(complex<T> a, complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (is_integer<T>::value) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
  template <class T>
  static complex<T> apply(complex<T> a, complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
// A NaN on any rank gives a NaN in the result, as in a single process.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct BitAnd {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <class T>
T divide(T value, int by) {
  return static_cast<T>(value / static_cast<T>(by));  // integers: toward zero
}
template <class T>
complex<T> divide(complex<T> value, int by) {
  return {value.re / static_cast<T>(by), value.im / static_cast<T>(by)};
}
template <class T>
T scale(T value, double by) {
  return static_cast<T>(value * static_cast<T>(by));
}
template <class T>
complex<T> scale(complex<T> value, double by) {
  return {scale(value.re, by), scale(value.im, by)};
}

// ---- what becomes of a result
struct Whole {
  explicit Whole(int) {}
  template <class T>
  T operator()(T value) const {
    return value;
  }
};
struct Divided {
  explicit Divided(int divisor) : by(divisor) {}
  template <class T>
  T operator()(T value) const {
    return divide(value, by);
  }
#if defined(__F16C__) && defined(__AVX2__)
  __m256 operator()(__m256 value) const {
    return _mm256_div_ps(value, _mm256_set1_ps(static_cast<float>(by)));
  }
#endif
  int by;
};

template <class T, class U>
constexpr bool kSame = false;
template <class T>
constexpr bool kSame<T, T> = true;

// ---- loops
// `ivdep`: an output may be the same memory as an input, which is not a loop-carried dependence.
#if defined(__clang__)
#define SDP_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define SDP_LOOP _Pragma("GCC ivdep")
#endif

// An element at any address: NumPy, for example, does not guarantee alignment.
template <class T>
struct __attribute__((packed, may_alias)) Loose {
  T value;
};

// Each loop first processes as many elements as possible with the processor's float16 conversions,
// if it has them.
#if defined(__F16C__) && defined(__AVX2__)
inline __m256 widen8(const Loose<half>* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline void narrow8(Loose<half>* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline size_t load_fast(Loose<float>* to, const Loose<half>* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(reinterpret_cast<float*>(to + i), widen8(from + i));
  return i;
}
template <class Finish>
size_t store_fast(Finish finish, Loose<half>* to, const Loose<float>* from, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    narrow8(to + i, finish(_mm256_loadu_ps(reinterpret_cast<const float*>(from + i))));
  return i;
}
template <class Finish>
size_t join_fast(Finish finish, Sum, Loose<half>* to, const Loose<float>* a, const Loose<float>* b,
                 size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 left = _mm256_loadu_ps(reinterpret_cast<const float*>(a + i));
    const __m256 right = _mm256_loadu_ps(reinterpret_cast<const float*>(b + i));
    narrow8(to + i, finish(_mm256_add_ps(left, right)));
  }
  return i;
}
template <class Finish>
size_t join_fast(Finish finish, Sum, Loose<half>* to, const Loose<half>* a, const Loose<half>* b,
                 size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) narrow8(to + i, finish(_mm256_add_ps(widen8(a + i), widen8(b + i))));
  return i;
}
#endif
template <class To, class From>
size_t load_fast(To*, const From*, size_t) {
  return 0;
}
template <class Finish, class To, class From>
size_t store_fast(Finish, To*, const From*, size_t) {
  return 0;
}
template <class Finish, class Operator, class To, class From>
size_t join_fast(Finish, Operator, To*, const From*, const From*, size_t) {
  return 0;
}

template <class Format, bool kScale>
void load(void* acc, const void* in, size_t n, double factor) {
  auto* to = static_cast<Loose<typename Format::Acc>*>(acc);
  const auto* from = static_cast<const Loose<typename Format::Element>*>(in);
  const size_t start = kScale ? 0 : load_fast(to, from, n);
  SDP_LOOP
  for (size_t i = start; i < n; ++i) {
    if constexpr (kScale) {
      to[i].value = scale(Format::in(from[i].value), factor);
    } else {
      to[i].value = Format::in(from[i].value);
    }
  }
}

template <class Acc, class Operator>
void fold(void* out, const void* a, const void* b, size_t n) {
  auto* to = static_cast<Loose<Acc>*>(out);
  const auto* x = static_cast<const Loose<Acc>*>(a);
  const auto* y = static_cast<const Loose<Acc>*>(b);
  SDP_LOOP
  for (size_t i = 0; i < n; ++i) to[i].value = Operator::apply(x[i].value, y[i].value);
}

template <class Format, class Finish>
void store(void* out, const void* acc, size_t n, int divisor) {
  const Finish finish(divisor);
  auto* to = static_cast<Loose<typename Format::Element>*>(out);
  const auto* from = static_cast<const Loose<typename Format::Acc>*>(acc);
  const size_t start = store_fast(finish, to, from, n);
  SDP_LOOP
  for (size_t i = start; i < n; ++i) to[i].value = Format::out(finish(from[i].value));
}

// From: accumulators, or elements.
template <class Format, class Operator, class Finish, class From>
void join(void* out, const void* a, const void* b, size_t n, int divisor) {
  const Finish finish(divisor);
  auto* to = static_cast<Loose<typename Format::Element>*>(out);
  const auto* x = static_cast<const Loose<From>*>(a);
  const auto* y = static_cast<const Loose<From>*>(b);
  const size_t start = join_fast(finish, Operator{}, to, x, y, n);
  SDP_LOOP
  for (size_t i = start; i < n; ++i) {
    if constexpr (kSame<From, typename Format::Acc>) {
      to[i].value = Format::out(finish(Operator::apply(x[i].value, y[i].value)));
    } else {
      const auto sum = Operator::apply(Format::in(x[i].value), Format::in(y[i].value));
      to[i].value = Format::out(finish(sum));
    }
  }
}

// ---- supported pairs
template <class Format, class Operator, class Finish = Whole, bool kScale = false>
Kernel make() {
  using Acc = typename Format::Acc;
  using Element = typename Format::Element;
  Kernel kernel;
  kernel.accumulator_size = sizeof(Acc);
  kernel.widens = !kSame<Acc, Element> || kScale;
  kernel.load = load<Format, kScale>;
  kernel.fold = fold<Acc, Operator>;
  kernel.store = store<Format, Finish>;
  kernel.join = join<Format, Operator, Finish, Acc>;
  if constexpr (!kScale) kernel.pair = join<Format, Operator, Finish, Element>;
  return kernel;
}

template <class Format>
Kernel arithmetic(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return make<Format, Sum>();
    case ReduceOp::product:
      return make<Format, Product>();
    default:
      return {};
  }
}

template <class Format>
Kernel ordered(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return make<Format, Min>();
    case ReduceOp::max:
      return make<Format, Max>();
    default:
      return arithmetic<Format>(op);
  }
}

template <class Format>
Kernel complex_number(ReduceOp op) {
  switch (op) {
    case ReduceOp::avg:
      return make<Format, Sum, Divided>();
    case ReduceOp::premul_sum:
      return make<Format, Sum, Whole, true>();
    default:
      return arithmetic<Format>(op);
  }
}

template <class Format>
Kernel floating(ReduceOp op) {
  const Kernel kernel = ordered<Format>(op);
  return kernel ? kernel : complex_number<Format>(op);
}

template <class T>
Kernel integer(ReduceOp op) {
  switch (op) {
    case ReduceOp::avg:
      return make<Wide<T>, Sum, Divided>();
    case ReduceOp::band:
      return make<Plain<T>, BitAnd>();
    case ReduceOp::bor:
      return make<Plain<T>, BitOr>();
    case ReduceOp::bxor:
      return make<Plain<T>, BitXor>();
    default:
      return ordered<Plain<T>>(op);
  }
}

// The sum of booleans is "any", the product "all".
Kernel logical(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
      return make<Boolean, BitOr>();
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return make<Boolean, BitAnd>();
    case ReduceOp::bxor:
      return make<Boolean, BitXor>();
    default:
      return {};
  }
}
}  // namespace

Kernel SDP_KERNELS(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float16:
      return floating<Half>(op);
    case DType::float32:
      return floating<Plain<float>>(op);
    case DType::float64:
      return floating<Plain<double>>(op);
    case DType::bfloat16:
      return floating<Bfloat>(op);
    case DType::int8:
      return integer<int8_t>(op);
    case DType::int16:
      return integer<int16_t>(op);
    case DType::int32:
      return integer<int32_t>(op);
    case DType::int64:
      return integer<int64_t>(op);
    case DType::uint8:
      return integer<uint8_t>(op);
    case DType::boolean:
      return logical(op);
    case DType::complex64:
      return complex_number<Plain<complex<float>>>(op);
    case DType::complex128:
      return complex_number<Plain<complex<double>>>(op);
  }
  return {};
}
}  // namespace sdp

#include "blocks.inl"
