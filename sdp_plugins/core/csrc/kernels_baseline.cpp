#define SDP_KERNELS kernel_baseline
#define SDP_BLOCKS blocks_baseline
#include "kernels.inl"
