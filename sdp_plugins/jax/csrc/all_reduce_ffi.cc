// XLA's side of the core's all_reduce, for jax.ffi. It is asynchronous: no thread of XLA waits, but
// goes on with what does not depend on it. Outputs alias inputs; a last pair of them is the turn,
// by which calls of one step follow each other.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "sdp_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {
// Where a future is set, XLA computes on in the same thread. That must not be the core's, which
// other operations wait for.
class Continuations {
 public:
  static Continuations& get() {
    static auto* made = new Continuations;  // its thread may outlive static variables
    return *made;
  }

  void push(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    filled_.notify_one();
  }

 private:
  Continuations() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
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

void finish(void* context, const char* error) {
  auto* promise = static_cast<ffi::Promise*>(context);
  Continuations::get().push(
      [promise, failed = error != nullptr, text = std::string(error ? error : "")] {
        if (failed) {
          promise->SetError(ffi::Error(ffi::ErrorCode::kAborted, text));
        } else {
          promise->SetAvailable();
        }
        delete promise;
      });
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  promise.SetError(std::move(error));
  return ffi::Future(promise);
}

ffi::Future all_reduce(int64_t api, int64_t endpoint, int32_t op, int32_t dtype, int32_t reduce_op,
                       double timeout_s, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  std::vector<SdpPiece> pieces;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto given = args.get<ffi::AnyBuffer>(i);
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (given.has_error()) return failed(given.error());
    if (output.has_error()) return failed(output.error());
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
  auto* promise = new ffi::Promise;
  ffi::Future future(*promise);
  char error[2048];
  if (reinterpret_cast<const SdpApi*>(api)->submit(&call, finish, promise, error, sizeof error) !=
      0) {
    finish(promise, error);
  }
  return future;
}
}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SdpAllReduce, all_reduce,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("api")
                                  .Attr<int64_t>("endpoint")
                                  .Attr<int32_t>("op")
                                  .Attr<int32_t>("dtype")
                                  .Attr<int32_t>("reduce_op")
                                  .Attr<double>("timeout_s")
                                  .RemainingArgs()
                                  .RemainingRets());
