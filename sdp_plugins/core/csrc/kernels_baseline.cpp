#define SDP_KERNELS kernel_baseline
#include "kernels.inl"
