#include "kernels.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sdp {
#if defined(__x86_64__)
namespace {
// Only newer compilers know "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
}  // namespace
#endif

KernelTable best_kernels() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
  static const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) return kernel_avx512;
  if (has_avx2) return kernel_avx2;
#endif
  return kernel_baseline;
}
}  // namespace sdp
