#include "streaming_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace sdp {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)  // which sees no streaming stores
namespace {
constexpr std::size_t kLine = 64;

__m128i load(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

void store(std::byte* to, __m128i value) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
}
}  // namespace

void streaming_copy(std::byte* target, const std::byte* source, std::size_t nbytes) {
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % kLine;
  std::size_t at = misaligned == 0 ? 0 : std::min(nbytes, kLine - misaligned);
  std::memcpy(target, source, at);
  for (; at + kLine <= nbytes; at += kLine) {  // whole lines, which are written at once
    const __m128i a = load(source + at), b = load(source + at + 16);
    const __m128i c = load(source + at + 32), d = load(source + at + 48);
    store(target + at, a);
    store(target + at + 16, b);
    store(target + at + 32, c);
    store(target + at + 48, d);
  }
  std::memcpy(target + at, source + at, nbytes - at);
  _mm_sfence();  // streaming stores obey no other order
}
#else
void streaming_copy(std::byte* target, const std::byte* source, std::size_t nbytes) {
  std::memcpy(target, source, nbytes);
}
#endif
}  // namespace sdp
