// Compiled with -mavx2 -mf16c; empty on other architectures.
#if defined(__x86_64__)
#define SDP_KERNELS kernel_avx2
#define SDP_BLOCKS blocks_avx2
#include "kernels.inl"
#endif
