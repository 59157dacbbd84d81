// Compiled with the flags of AVX-512; empty on other architectures.
#if defined(__x86_64__)
#define SDP_KERNELS kernel_of_avx512
#define SDP_BLOCKS blocks_avx512
#include "kernels.inl"

namespace sdp {

// GCC makes a fused "fmaddsub" of complex products, which rounds otherwise: see CMakeLists.txt.
Kernel kernel_avx512(DType dtype, ReduceOp op) {
  const bool is_complex = dtype == DType::complex64 || dtype == DType::complex128;
  return is_complex ? kernel_avx2(dtype, op) : kernel_of_avx512(dtype, op);
}
}  // namespace sdp
#endif
