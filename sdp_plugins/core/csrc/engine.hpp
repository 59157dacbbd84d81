// Drives a group's collectives in the order they were issued: in the caller's thread if it waits
// anyway and nothing is queued (no hand-over, microseconds), else in the engine's own thread, which
// starts with the first asynchronous operation. One thread per group: groups whose operations are
// issued in different orders on different ranks cannot block each other.
//
// The thread never throws and never ends silently: a failure goes to every queued Work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "communicator.hpp"
#include "owned_thread.hpp"
#include "work.hpp"

namespace sdp {

class Engine {
 public:
  // `spin_us`: how long a waiting caller polls before it sleeps; negative: as fits the cores.
  Engine(std::shared_ptr<Communicator> communicator, int spin_us);
  ~Engine();

  // Blocks until done. `interrupt` is called now and then and may throw, which fails the group.
  void run(const Request& request, const std::function<void()>& interrupt);
  std::shared_ptr<Work> submit(Request request);
  std::uint64_t issued() const;  // operations so far
  void close();                  // fails what is queued, joins the thread

 private:
  struct Item {
    Request request;
    std::shared_ptr<Work> work;
    QueuedRun queued;
  };
  void wait_for_queue(Work& work, const Request& request,
                      const std::function<void()>& interrupt) const;
  void refuse_reentry(const Request& request) const;  // with the lock held
  std::shared_ptr<Work> enqueue(Request request);     // with the lock held
  void loop();

  std::shared_ptr<Communicator> communicator_;
  Patience foreground_, background_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  std::atomic<std::uint64_t> issued_{
      0};                     // operations so far: the number that the last one has, or will have
  bool busy_ = false;         // somebody is running an operation
  std::thread::id caller_{};  // the thread that runs its own operation, if one does
  bool stopping_ = false;
  OwnedThread thread_;
};
}  // namespace sdp
