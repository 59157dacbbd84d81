// A thread that belongs to one process: a forked child has the object, but not the thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "owner_process.hpp"

namespace sdp {

class OwnedThread {
 public:
  OwnedThread() = default;
  ~OwnedThread();
  bool started() const { return thread_ != nullptr; }
  bool ours() const { return owner_.is_this(); }
  // The thread blocks signals, which stay with the program's threads. `name`: at most 15
  // characters.
  void start(std::function<void()> body, const char* name);
  void join();  // may be called from several threads

 private:
  const OwnerProcess owner_;
  std::mutex joining_;
  std::unique_ptr<std::thread> thread_;
};
}  // namespace sdp
