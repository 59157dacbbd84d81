#include "helper_threads.hpp"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "clock.hpp"

namespace sdp {
namespace {
constexpr std::size_t kWorthBytes = 256 * 1024;  // takes longer than to wake a thread
constexpr std::size_t kAlignElements = 128;      // no two threads write into one cache line

void spin_for(std::uint32_t spin_us, const std::function<bool()>& reached) {
  const double end_s = now_s() + 1e-6 * spin_us;
  while (!reached() && now_s() < end_s) sched_yield();
}
}  // namespace

HelperThreads::~HelperThreads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  helpers_.clear();  // joins them
}

void HelperThreads::divide(std::size_t count, std::size_t itemsize,
                           const std::function<void(Range)>& work, std::uint32_t spin_us) {
  const auto worth = static_cast<int>(std::min<std::size_t>(count * itemsize / kWorthBytes, 1024));
  if (std::min(threads_, worth) <= 1) return work({0, count});
  if (helpers_.empty()) start();
  const int threads = std::min(static_cast<int>(helpers_.size()) + 1, worth);
  const Shards shards(count, threads, kAlignElements);
  {
    const std::lock_guard lock(mutex_);
    for (int i = 1; i < threads; ++i)
      parts_[static_cast<std::size_t>(i - 1)] = {&work, shards.shard(i)};
    unfinished_ = static_cast<std::size_t>(threads - 1);
    error_ = nullptr;
    spin_us_ = spin_us;
    divided_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_all();
  std::exception_ptr mine;
  try {
    work(shards.shard(0));
  } catch (...) {
    mine = std::current_exception();
  }
  spin_for(spin_us, [this] { return unfinished_.load(std::memory_order_acquire) == 0; });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return unfinished_ == 0; });  // they use the caller's memory
  if (mine) std::rethrow_exception(mine);
  if (error_) std::rethrow_exception(error_);
}

void HelperThreads::start() {
  parts_.resize(static_cast<std::size_t>(threads_ - 1));
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    auto thread = std::make_unique<OwnedThread>();
    try {
      thread->start([this, i] { loop(i); }, "sdp-helper");
    } catch (const std::system_error&) {
      return;  // the process may have no more: go on with fewer
    }
    helpers_.push_back(std::move(thread));
  }
}

void HelperThreads::loop(std::size_t index) {
  std::uint32_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    if (spin_us_ > 0 && !stopping_ && parts_[index].work == nullptr) {
      const std::uint32_t spin_us = spin_us_;
      lock.unlock();
      spin_for(spin_us, [&] { return divided_.load(std::memory_order_acquire) != seen; });
      lock.lock();
    }
    changed_.wait(lock, [&] { return stopping_ || parts_[index].work != nullptr; });
    if (parts_[index].work == nullptr) return;
    const Part part = parts_[index];
    seen = divided_;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*part.work)(part.range);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    parts_[index].work = nullptr;
    if (error && !error_) error_ = error;
    if (--unfinished_ == 0) changed_.notify_all();
  }
}
}  // namespace sdp
