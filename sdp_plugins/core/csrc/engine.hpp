// Runs a group's collectives in the order they were issued. A blocking call runs in the caller's
// thread if the queue is empty, which saves microseconds. Other operations run in the engine's own
// thread, which starts with the first asynchronous operation. Each group has its own thread, so
// groups whose operations are issued in different orders on different ranks cannot block each
// other.
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
  // `spin_us`: how long a waiting caller polls before it sleeps; negative: chosen by the number of
  // cores.
  Engine(std::shared_ptr<Communicator> communicator, int spin_us);
  ~Engine();

  // Blocks until the operation is done. `interrupt` is called periodically and may throw, which
  // fails the group.
  void run(const Request& request, const std::function<void()>& interrupt);
  std::shared_ptr<Work> submit(Request request);
  std::uint64_t issued() const;  // number of operations so far
  void close();                  // fails the queued operations, joins the thread

 private:
  struct Item {
    Request request;
    std::shared_ptr<Work> work;
    OperationRecord record;
  };
  void wait_for_queue(Work& work, const Request& request,
                      const std::function<void()>& interrupt) const;
  void refuse_reentry(const Request& request) const;                    // with the lock held
  std::shared_ptr<Work> enqueue(Request request);                       // with the lock held
  OperationRecord record_of(const Request& request, const Work* work);  // numbers the operation
  void loop();
  void finish(const Item& item, std::optional<Failure> failure);
  void await_arrival(const DeviceFlags& flags);

  std::shared_ptr<Communicator> communicator_;
  Patience foreground_, background_, of_devices_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  std::atomic<std::uint64_t> issued_{0};  // number of the last operation
  bool busy_ = false;                     // an operation is running
  std::thread::id caller_{};              // the caller that runs its own operation, if any
  bool stopping_ = false;
  double give_up_s_ = 0;  // when a closed group stops waiting for its device
  OwnedThread thread_;
};
}  // namespace sdp
