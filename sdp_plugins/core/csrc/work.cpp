#include "work.hpp"

#include <algorithm>
#include <chrono>

#include "futex_counter.hpp"
#include "trace.hpp"

namespace sdp {

Work::Work(Progress progress) : progress_(std::move(progress)) {}

bool Work::completed() const {
  return completed_.load(std::memory_order_acquire);
}

std::optional<Failure> Work::failure() const {
  return completed() ? failure_ : std::nullopt;
}

int Work::source_rank() const {
  return completed() ? source_rank_ : -1;
}

Work::Waiter Work::waiter() const {
  const std::lock_guard lock(mutex_);
  return waiter_;
}

bool Work::wait(double timeout_s, const std::function<void()>& interrupt) {
  const double deadline_s = now_s() + timeout_s;
  if (!owner_.is_this()) {
    if (!completed())
      throw forked().compose("", RankNames(), 0);  // no thread of this process would finish it
    if (failure_) throw *failure_;
    return true;
  }
  std::unique_lock lock(mutex_);
  if (!completed_ && waiter_.since_ns == 0) waiter_ = {now_ns(), this_thread()};
  if (!completed_) {
    lock.unlock();
    if (progress_) progress_(*this);
    lock.lock();
  }
  while (!completed_) {
    const double slice_s = std::min(0.1, deadline_s - now_s());
    if (slice_s <= 0) return false;
    done_.wait_for(lock, std::chrono::duration<double>(slice_s));
    if (!completed_ && interrupt) {
      lock.unlock();
      interrupt();
      lock.lock();
    }
  }
  if (failure_) throw *failure_;
  return true;
}

void Work::then(Callback callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!completed_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(failure_ ? &*failure_ : nullptr);
}

void Work::finish(std::optional<Failure> failure, int source_rank) {
  std::vector<Callback> callbacks;
  const std::optional<Failure> told = failure;
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    source_rank_ = source_rank;
    completed_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    done_.notify_all();  // with the lock held: the waiter may destroy this object after its release
  }
  for (const Callback& callback : callbacks) callback(told ? &*told : nullptr);
}
}  // namespace sdp
