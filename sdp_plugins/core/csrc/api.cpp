#include "api.hpp"

#include <cstring>
#include <exception>

#include "fusion_plan.hpp"

namespace sdp {
namespace {

Request request(const SdpAllReduceCall& call) {
  Request made;
  made.op = Op::all_reduce;
  made.dtype = static_cast<DType>(call.dtype);
  made.reduce_op = static_cast<ReduceOp>(call.reduce_op);
  made.timeout_s = call.timeout_s;
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < call.n_pieces; ++i) {
    made.recvs.push_back({static_cast<std::byte*>(call.pieces[i].data), call.pieces[i].count});
    counts.push_back(call.pieces[i].count);
  }
  made.layout = layout_of(counts);
  return made;
}

int all_reduce(const SdpAllReduceCall* call, SdpDone done, void* context, char* error,
               std::size_t error_size) {
  const auto refuse = [&](const char* text) {
    if (error_size == 0) return 1;
    std::strncpy(error, text, error_size - 1);
    error[error_size - 1] = '\0';
    return 1;
  };
  try {
    call->endpoint->submit(request(*call))->then([done, context](const Failure* failure) {
      done(context, failure != nullptr ? failure->what() : nullptr);
    });
    return 0;
  } catch (const std::exception& failure) {
    return refuse(failure.what());
  } catch (...) {
    return refuse("an exception of unknown type");
  }
}
}  // namespace

SdpEndpoint* make_endpoint(const std::shared_ptr<Engine>& engine) {
  return new SdpEndpoint{[weak = std::weak_ptr(engine)](Request request) {
    if (const auto held = weak.lock()) return held->submit(std::move(request));
    throw Failure(FailureKind::closed, "the group is closed", {}, Hint::compile_again)
        .compose("", RankNames(), 0);
  }};
}

const SdpApi* api() {
  static constexpr SdpApi table{all_reduce};
  return &table;
}
}  // namespace sdp
