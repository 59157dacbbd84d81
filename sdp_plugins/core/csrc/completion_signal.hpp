// Tells a thread that works are done, without one waiting thread per work.
#pragma once

#include <semaphore.h>

#include <memory>

#include "work.hpp"

namespace sdp {

// Copies are handles on one signal. Unlike a condition variable, it may be destroyed in a forked
// child while a thread of the parent waits on it.
class CompletionSignal {
 public:
  CompletionSignal()
      : raised_(new sem_t, [](sem_t* raised) { sem_destroy(raised), delete raised; }) {
    sem_init(raised_.get(), 0, 0);
  }
  void set() const { sem_post(raised_.get()); }
  // Sets the signal when the work is done, at once if it is done already.
  void set_after(Work& work) const {
    work.then([signal = *this](const Failure*) { signal.set(); });
  }
  // Waits until the signal is set, and clears it.
  void wait() const {
    while (sem_wait(raised_.get()) != 0) {
    }
    while (sem_trywait(raised_.get()) == 0) {
    }
  }

 private:
  std::shared_ptr<sem_t> raised_;
};
}  // namespace sdp
