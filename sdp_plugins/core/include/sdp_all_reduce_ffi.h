/* The core's all_reduce as a call that XLA makes, for the plug-ins of frameworks that compile by
 * it.
 *
 * C++, to be compiled against the framework's copy of XLA's FFI. Its last operand and result are
 * the turn, a scalar by which the calls of a program follow each other: XLA runs what does not
 * depend on each other in any order. */
#ifndef SDP_ALL_REDUCE_FFI_H_
#define SDP_ALL_REDUCE_FFI_H_

#include <cstring>
#include <vector>

#include "sdp_api.h"
#include "xla/ffi/api/ffi.h"

namespace sdp {

/* Results are meant to be aliases of operands; where XLA could not make them so, it copies. */
inline xla::ffi::Error AllReduce(int64_t api, int64_t endpoint, int32_t op, int32_t dtype,
                                 int32_t reduce_op, double timeout_s, xla::ffi::RemainingArgs args,
                                 xla::ffi::RemainingRets rets) {
  std::vector<SdpPiece> pieces;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto given = args.get<xla::ffi::AnyBuffer>(i);
    auto output = rets.get<xla::ffi::AnyBuffer>(i);
    if (given.has_error()) return given.error();
    if (output.has_error()) return output.error();
    xla::ffi::AnyBuffer to = **output;
    if (to.untyped_data() != given->untyped_data()) {
      std::memcpy(to.untyped_data(), given->untyped_data(), given->size_bytes());
    }
    if (i + 1 < rets.size()) pieces.push_back({to.untyped_data(), to.element_count()});
  }
  const SdpCall call{reinterpret_cast<SdpEndpoint*>(endpoint),
                     op,
                     dtype,
                     reduce_op,
                     nullptr,
                     0,
                     pieces.data(),
                     pieces.size(),
                     timeout_s};
  char error[2048];
  if (reinterpret_cast<const SdpApi*>(api)->run(&call, error, sizeof error) != 0) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kAborted, error);
  }
  return xla::ffi::Error::Success();
}

}  // namespace sdp

#define SDP_DEFINE_ALL_REDUCE(name)                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, sdp::AllReduce,           \
                                xla::ffi::Ffi::Bind()           \
                                    .Attr<int64_t>("api")       \
                                    .Attr<int64_t>("endpoint")  \
                                    .Attr<int32_t>("op")        \
                                    .Attr<int32_t>("dtype")     \
                                    .Attr<int32_t>("reduce_op") \
                                    .Attr<double>("timeout_s")  \
                                    .RemainingArgs()            \
                                    .RemainingRets())

#endif  // SDP_ALL_REDUCE_FFI_H_
