#include "api.hpp"

#include <cstring>
#include <exception>

#include "fusion_plan.hpp"

namespace sdp {
namespace {

std::vector<Piece> pieces(const SdpPiece* first, std::size_t count) {
  std::vector<Piece> found;
  found.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    found.push_back({static_cast<std::byte*>(first[i].data), first[i].count});
  }
  return found;
}

Request request(const SdpCall& call) {
  Request made;
  made.op = static_cast<Op>(call.op);
  made.dtype = static_cast<DType>(call.dtype);
  made.reduce_op = static_cast<ReduceOp>(call.reduce_op);
  made.timeout_s = call.timeout_s;
  made.sends = pieces(call.sends, call.n_sends);
  made.recvs = pieces(call.recvs, call.n_recvs);
  if (made.op == Op::all_reduce) {
    std::vector<std::uint64_t> counts;
    for (const Piece& piece : made.recvs) counts.push_back(piece.count);
    made.layout = layout_of(counts);
  }
  return made;
}

// Runs `body`; returns 0, or 1 and the text of its exception.
template <class Body>
int guarded(char* error, std::size_t error_size, const Body& body) {
  const auto refuse = [&](const char* text) {
    if (error_size == 0) return 1;
    std::strncpy(error, text, error_size - 1);
    error[error_size - 1] = '\0';
    return 1;
  };
  try {
    body();
    return 0;
  } catch (const std::exception& failure) {
    return refuse(failure.what());
  } catch (...) {
    return refuse("an exception of unknown type");
  }
}

int run(const SdpCall* call, char* error, std::size_t error_size) {
  return guarded(error, error_size, [&] { call->endpoint->run(request(*call)); });
}

int submit(const SdpCall* call, SdpDone done, void* context, char* error, std::size_t error_size) {
  return guarded(error, error_size, [&] {
    call->endpoint->submit(request(*call))->then([done, context](const Failure* failure) {
      done(context, failure != nullptr ? failure->what() : nullptr);
    });
  });
}

std::shared_ptr<Engine> alive(const std::weak_ptr<Engine>& engine) {
  if (auto held = engine.lock()) return held;
  throw Failure(FailureKind::closed, "the group is closed", {}, Hint::compile_again)
      .compose("", RankNames(), 0);
}
}  // namespace

SdpEndpoint* make_endpoint(const std::shared_ptr<Engine>& engine) {
  const std::weak_ptr<Engine> weak = engine;
  return new SdpEndpoint{
      [weak](Request request) { alive(weak)->run(std::move(request), [] {}); },
      [weak](Request request) { return alive(weak)->submit(std::move(request)); }};
}

SdpEndpoint* make_endpoint(std::function<std::shared_ptr<Work>(Request)> submit) {
  const auto run = [submit](Request request) {
    const std::shared_ptr<Work> work = submit(std::move(request));
    while (!work->wait(3600)) {  // the operation has its own time-out
    }
  };
  return new SdpEndpoint{run, std::move(submit)};
}

const SdpApi* api() {
  static constexpr SdpApi table{SDP_API_VERSION, run, submit};
  return &table;
}
}  // namespace sdp
