// Threads that share the work of one operation with the thread that runs it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "owned_thread.hpp"
#include "shards.hpp"

namespace sdp {

class HelperThreads {
 public:
  // `threads`: with the caller. The others start with the first work that is worth it.
  explicit HelperThreads(int threads) : threads_(threads) {}
  ~HelperThreads();

  // Calls `work` for the parts of `count` elements of this size, in all threads at once, and
  // returns when all are done; then throws the first error. One caller at a time. `spin_us`: how
  // long threads poll, for the end and then for more work, before they sleep.
  void divide(std::size_t count, std::size_t itemsize, const std::function<void(Range)>& work,
              std::uint32_t spin_us = 0);

 private:
  struct Part {
    const std::function<void(Range)>* work = nullptr;
    Range range;
  };
  void start();
  void loop(std::size_t index);

  const int threads_;
  std::uint32_t spin_us_ = 0;  // of the last work
  // Polled without the lock: changes with each new work, and with the end of each part.
  std::atomic<std::uint32_t> divided_{0};
  std::atomic<std::size_t> unfinished_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<OwnedThread>> helpers_;
  std::vector<Part> parts_;  // of each helper
  std::exception_ptr error_;
  bool stopping_ = false;
};
}  // namespace sdp
