/* The core, for the native code of a framework's plug-in: operations that TensorFlow or XLA run.
 *
 * Such code is compiled where the framework is installed, against this header alone, and is given
 * the functions' addresses at run time (sdp_plugins.core._native.api). Nothing here throws. */
#ifndef SDP_API_H_
#define SDP_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A group's way in. Lives as long as the process; once its group is closed, all calls fail. */
typedef struct SdpEndpoint SdpEndpoint;

/* Contiguous elements. */
typedef struct SdpPiece {
  void* data;
  uint64_t count;
} SdpPiece;

/* An all_reduce in place on pieces of one type, which count as one buffer: the ranks must agree in
 * each piece's length. Numbers are those of DType and ReduceOp of the core. */
typedef struct SdpAllReduceCall {
  SdpEndpoint* endpoint;
  int32_t dtype;
  int32_t reduce_op;
  const SdpPiece* pieces;
  size_t n_pieces;
  double timeout_s;
} SdpAllReduceCall;

/* `error`: the message of the failure, valid during the call; NULL after success. */
typedef void (*SdpDone)(void* context, const char* error);

typedef struct SdpApi {
  /* Queues the operation. Returns 0, and `done` is called once, from another thread; the pieces'
   * memory belongs to the operation until then. Or else `error` holds the message, cut to
   * `error_size`, and `done` is never called. */
  int (*all_reduce)(const SdpAllReduceCall* call, SdpDone done, void* context, char* error,
                    size_t error_size);
} SdpApi;

#ifdef __cplusplus
}
#endif
#endif /* SDP_API_H_ */
