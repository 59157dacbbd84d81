// The core's all_reduce as an XLA FFI call, for jax.ffi. The call is asynchronous: no thread of XLA
// waits, and XLA continues with operations that do not depend on the result. The last operand and
// result are the turn, a scalar that orders the calls of a program: XLA runs independent operations
// in any order.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sdp_api.h"
#include "xla/ffi/api/ffi.h"

namespace {

/* Where a future is set, XLA computes on in the same thread. That must not be the core's, which
 * other operations wait for. */
class Continuations {
 public:
  static Continuations& Get() {
    static auto* made = new Continuations;  // its thread may outlive static variables
    return *made;
  }

  void Push(std::function<void()> work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    filled_.notify_one();
  }

 private:
  Continuations() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait(lock, [this] { return !queue_.empty(); });
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> queue_;
};

void Finish(void* context, const char* error) {
  auto* promise = static_cast<xla::ffi::Promise*>(context);
  const bool failed = error != nullptr;
  Continuations::Get().Push([promise, failed, text = std::string(failed ? error : "")] {
    if (failed) {
      promise->SetError(xla::ffi::Error(xla::ffi::ErrorCode::kAborted, text));
    } else {
      promise->SetAvailable();
    }
    delete promise;
  });
}

xla::ffi::Future Failed(xla::ffi::Error error) {
  xla::ffi::Promise promise;
  promise.SetError(std::move(error));
  return xla::ffi::Future(promise);
}

/* Results are meant to be aliases of operands; where XLA could not make them so, it copies. */
xla::ffi::Future AllReduce(int64_t api, int64_t endpoint, int32_t dtype, int32_t reduce_op,
                           double timeout_s, xla::ffi::RemainingArgs args,
                           xla::ffi::RemainingRets rets) {
  std::vector<SdpPiece> pieces;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto given = args.get<xla::ffi::AnyBuffer>(i);
    auto output = rets.get<xla::ffi::AnyBuffer>(i);
    if (given.has_error()) return Failed(given.error());
    if (output.has_error()) return Failed(output.error());
    xla::ffi::AnyBuffer to = **output;
    if (to.untyped_data() != given->untyped_data()) {
      std::memcpy(to.untyped_data(), given->untyped_data(), given->size_bytes());
    }
    if (i + 1 < rets.size()) pieces.push_back({to.untyped_data(), to.element_count()});
  }
  const SdpAllReduceCall call{reinterpret_cast<SdpEndpoint*>(endpoint),
                              dtype,
                              reduce_op,
                              pieces.data(),
                              pieces.size(),
                              timeout_s};
  auto* promise = new xla::ffi::Promise;
  xla::ffi::Future future(*promise);
  char error[2048];
  if (reinterpret_cast<const SdpApi*>(api)->all_reduce(&call, Finish, promise, error,
                                                       sizeof error) != 0) {
    Finish(promise, error);
  }
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SdpAllReduce, AllReduce,
                              xla::ffi::Ffi::Bind()
                                  .Attr<int64_t>("api")
                                  .Attr<int64_t>("endpoint")
                                  .Attr<int32_t>("dtype")
                                  .Attr<int32_t>("reduce_op")
                                  .Attr<double>("timeout_s")
                                  .RemainingArgs()
                                  .RemainingRets());
