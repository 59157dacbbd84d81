#include "blocks.hpp"
#include "kernels.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sdp {
#if defined(__x86_64__)
namespace {
enum class Vectors { sse2, avx2, avx512 };

// Asks the processor: __builtin_cpu_supports() is missing, or wrong, in some compilers' libraries.
Vectors vectors() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const unsigned needed = bit_OSXSAVE | bit_AVX | bit_F16C;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & needed) != needed) return Vectors::sse2;
  unsigned kept = 0;  // the registers that the system keeps for a thread
  asm("xgetbv" : "=a"(kept), "=d"(edx) : "c"(0));
  const unsigned ymm = 0x6, zmm = 0xe6;
  if ((kept & ymm) != ymm || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 ||
      (ebx & bit_AVX2) == 0) {
    return Vectors::sse2;
  }
  const unsigned all = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return (kept & zmm) == zmm && (ebx & all) == all ? Vectors::avx512 : Vectors::avx2;
}
}  // namespace
#endif

KernelTable best_kernels() {
#if defined(__x86_64__)
  static const Vectors has = vectors();
  if (has == Vectors::avx512) return kernel_avx512;
  if (has == Vectors::avx2) return kernel_avx2;
#endif
  return kernel_baseline;
}

BlockTable best_blocks() {
#if defined(__x86_64__)
  if (best_kernels() == kernel_avx512) return blocks_avx512;
  if (best_kernels() == kernel_avx2) return blocks_avx2;
#endif
  return blocks_baseline;
}
}  // namespace sdp
