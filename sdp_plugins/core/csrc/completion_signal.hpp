// Tells a thread that works are done, without a thread that waits for each of them.
#pragma once

#include <semaphore.h>

#include <memory>

#include "work.hpp"

namespace sdp {

// Copies are handles on one signal. In a forked child it may be destroyed while its thread waits in
// the parent, as a condition variable may not.
class CompletionSignal {
 public:
  CompletionSignal()
      : raised_(new sem_t, [](sem_t* raised) { sem_destroy(raised), delete raised; }) {
    sem_init(raised_.get(), 0, 0);
  }
  void set() const { sem_post(raised_.get()); }
  // Set once the work is done, which may be now.
  void set_after(Work& work) const {
    work.then([signal = *this](const Failure*) { signal.set(); });
  }
  // Waits until it is set, and clears it.
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
