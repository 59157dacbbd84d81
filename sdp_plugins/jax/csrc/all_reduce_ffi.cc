// XLA's side of the core's all_reduce, for jax.ffi. Outputs alias inputs; a last pair of them is
// the turn, by which calls of one step follow each other.
#include <cstring>
#include <vector>

#include "sdp_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error AllReduce(int64_t api, int64_t endpoint, int32_t op, int32_t dtype,
                            int32_t reduce_op, double timeout_s, ffi::RemainingArgs args,
                            ffi::RemainingRets rets) {
  std::vector<SdpPiece> pieces;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto given = args.get<ffi::AnyBuffer>(i);
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (given.has_error()) return given.error();
    if (output.has_error()) return output.error();
    ffi::AnyBuffer to = **output;
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
    return ffi::Error(ffi::ErrorCode::kAborted, error);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SdpAllReduce, AllReduce,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("api")
                                  .Attr<int64_t>("endpoint")
                                  .Attr<int32_t>("op")
                                  .Attr<int32_t>("dtype")
                                  .Attr<int32_t>("reduce_op")
                                  .Attr<double>("timeout_s")
                                  .RemainingArgs()
                                  .RemainingRets());
