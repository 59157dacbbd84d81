// A handle on an operation that an engine will finish.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "error.hpp"

namespace sdp {

class Work {
 public:
  Work();
  bool completed() const;
  // The failure, if it has completed with one.
  std::optional<Failure> failure() const;
  // Throws the operation's failure. False if it is not done after `timeout_s`; the operation goes
  // on. `interrupt` is called now and then and may throw.
  bool wait(double timeout_s, const std::function<void()>& interrupt = {});
  int source_rank() const;  // recv: who sent; else -1

  // Who was the first to wait for it before it was done, and since when; 0: nobody.
  struct Waiter {
    std::int64_t since_ns = 0;
    std::uint32_t thread = 0;
  };
  Waiter waiter() const;

  // Calls `callback` once, when the work is done: with its failure, or null. In the thread that
  // finishes it, or here if it has been.
  using Callback = std::function<void(const Failure*)>;
  void then(Callback callback);

  void finish(std::optional<Failure> failure = std::nullopt, int source_rank = -1);

 private:
  const int owner_pid_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool completed_ = false;
  std::optional<Failure> failure_;
  int source_rank_ = -1;
  Waiter waiter_;
  std::vector<Callback> callbacks_;
};
}  // namespace sdp
