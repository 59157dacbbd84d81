#include "owned_thread.hpp"

#include <pthread.h>

#include <csignal>

namespace sdp {

OwnedThread::~OwnedThread() {
  if (!ours()) {
    (void)thread_.release();  // neither joinable nor detachable: leak it
    return;
  }
  join();
}

void OwnedThread::start(std::function<void()> body, const char* name) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::make_unique<std::thread>(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_->native_handle(), name);
}

void OwnedThread::join() {
  if (!thread_ || !ours()) return;
  const std::lock_guard lock(joining_);
  if (thread_->joinable()) thread_->join();
}
}  // namespace sdp
