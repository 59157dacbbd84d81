// XLA's side of the core's all_reduce, for jax.ffi.
#include "sdp_all_reduce_ffi.h"

SDP_DEFINE_ALL_REDUCE(SdpAllReduce);
