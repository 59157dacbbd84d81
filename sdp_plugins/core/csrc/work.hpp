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
#include "owner_process.hpp"

namespace sdp {

// `completed` and `failure` take no lock: in a forked child, a thread that does not exist there may
// hold it.
class Work {
 public:
  // `progress`: called first by a thread that waits, to move the operation on without another
  // thread's help. Returns after a limited time; must not throw.
  using Progress = std::function<void(const Work&)>;
  explicit Work(Progress progress = {});
  bool completed() const;
  // The failure, if it has completed with one.
  std::optional<Failure> failure() const;
  // Throws the operation's failure. Returns false if it is not done after `timeout_s`; the
  // operation continues. `interrupt` is called periodically and may throw.
  bool wait(double timeout_s, const std::function<void()>& interrupt = {});
  int source_rank() const;  // recv: the sending rank; else -1

  // The first thread that waited before the work was done, and since when; 0: none did.
  struct Waiter {
    std::int64_t since_ns = 0;
    std::uint32_t thread = 0;
  };
  Waiter waiter() const;

  // Calls `callback` once when the work is done, with its failure or null: in the thread that
  // finishes the work, or in this one if it is done already.
  using Callback = std::function<void(const Failure*)>;
  void then(Callback callback);

  void finish(std::optional<Failure> failure = std::nullopt, int source_rank = -1);

 private:
  const OwnerProcess owner_;
  const Progress progress_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::optional<Failure> failure_;  // like `source_rank_`, constant once `completed_`
  int source_rank_ = -1;
  std::atomic<bool> completed_{false};
  Waiter waiter_;
  std::vector<Callback> callbacks_;
};
}  // namespace sdp
