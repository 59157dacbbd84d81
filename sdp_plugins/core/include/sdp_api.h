/* The core, for the native code of a framework's plug-in: operations that TensorFlow or XLA run.
 *
 * Such code is compiled where the framework is installed, against this header alone, and is given
 * the functions' addresses at run time (sdp_plugins.core.native_api). Nothing here throws. */
#ifndef SDP_API_H_
#define SDP_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SDP_API_VERSION 1

/* A group's way in. Lives as long as the process; once its group is closed, all calls fail. */
typedef struct SdpEndpoint SdpEndpoint;

/* Contiguous elements. */
typedef struct SdpPiece {
  void* data;
  uint64_t count;
} SdpPiece;

/* A collective on pieces of one type. Numbers are those of DType, ReduceOp and Op of the core. The
 * ranks' pieces of an all_reduce count as one buffer, pieces laid end to end; ranks must agree in
 * each piece's length. */
typedef struct SdpCall {
  SdpEndpoint* endpoint;
  int32_t op;
  int32_t dtype;
  int32_t reduce_op;
  const SdpPiece* sends;
  size_t n_sends;
  const SdpPiece* recvs;
  size_t n_recvs;
  double timeout_s;
} SdpCall;

/* `error`: the message of the failure, valid during the call; NULL after success. */
typedef void (*SdpDone)(void* context, const char* error);

typedef struct SdpApi {
  uint32_t version;
  /* Blocks until done. 0, or else `error` holds the message, cut to `error_size`. */
  int (*run)(const SdpCall* call, char* error, size_t error_size);
  /* Queues the collective. 0, and `done` is called once, from another thread; the pieces' memory
   * belongs to the operation until then. Or as above, and `done` is never called. */
  int (*submit)(const SdpCall* call, SdpDone done, void* context, char* error, size_t error_size);
} SdpApi;

#ifdef __cplusplus
}
#endif
#endif /* SDP_API_H_ */
