// A handle on an operation that an engine will finish.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "error.hpp"

namespace sdp {

class Work;

// Finishes works by what the thread does that waits for one, without any other thread's help.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual void drive(const Work& work) = 0;  // for a while; must not throw
};

// Whether it is done, and how, may be asked in a forked child too, where a lock may be held by a
// thread that the child does not have.
class Work {
 public:
  // `driver`: is asked first by whoever waits; may have ended before this.
  explicit Work(std::weak_ptr<Driver> driver = {});
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
  const std::weak_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::optional<Failure> failure_;  // like the next one, constant once it has completed
  int source_rank_ = -1;
  std::atomic<bool> completed_{false};
  Waiter waiter_;
  std::vector<Callback> callbacks_;
};
}  // namespace sdp
