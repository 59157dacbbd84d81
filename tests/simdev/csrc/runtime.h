// The simulated accelerator, without torch: streams that are threads, marks (what an event
// records), gates, memory that the host cannot touch, registered host memory, links.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simdev {

constexpr int kDevices = 2;

double now_s();

// A point in a stream's queue. Guarded by the runtime's mutex.
struct Mark {
  bool done = false;
  double time_s = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Gate {
  bool open = false;
};

enum class Kind {
  kWork,      // kernels and copies: raise if the device has failed, may be told to fail
  kInternal,  // waits and poisoning: never raise
  kMark,      // run even after the device has failed, so that waits end
};

struct Task {
  Kind kind;
  std::function<void()> run;
  const char* what;
};

// Members are guarded by the runtime's mutex.
struct Stream {
  Stream(int device, int64_t id) : device(device), id(id) {}

  const int device;
  const int64_t id;  // 0: the default stream of its device; else unique in the process
  std::deque<Task> queue;
  std::condition_variable arrived;
  std::thread thread;  // ends when it has been idle for a while; started again as needed
  bool alive = false;
  bool busy = false;
  std::atomic<bool> capturing{false};
  const char* doing = "";  // for the message of a wait that takes too long
  bool failing = false;    // the next operation fails with fail_text
  std::string fail_text;
};

enum Direction { kDown = 0, kUp = 1 };  // device to host, host to device

struct Device {
  bool used = false;
  std::string error;  // sticky
  std::array<double, 2> link_free_s{};
};

// All of one process's devices. A forked child gets a new one; its parent's is leaked there.
class Runtime {
 public:
  static Runtime& get();

  Runtime();

  // Streams. `find` throws for an id that this process does not have.
  Stream* find(int device, int64_t id);
  Stream* from_handle(uint64_t handle);  // id or address; nullptr if neither
  Stream* create(int device);
  std::vector<Stream*> all(int device);  // -1: of all devices

  // Throws what the device has failed with if the task is work.
  void enqueue(Stream* stream, Kind kind, const char* what, std::function<void()> run);
  MarkPtr mark(Stream* stream);
  void wait_mark(Stream* stream, MarkPtr mark);  // in the stream
  bool is_idle(Stream* stream);

  // Waits of the host. They throw after the deadline, and if the device has failed.
  void synchronize(Stream* stream);
  void synchronize_device(int device);
  void host_wait(const MarkPtr& mark, int device);
  bool is_done(const MarkPtr& mark);

  // Waits within a stream's thread: false if the queues are being drained.
  bool wait_until(const std::function<bool()>& ready);
  bool sleep_until(double time_s);
  bool draining() const { return draining_.load(std::memory_order_relaxed); }

  int64_t gate_create();
  void gate_open(int64_t id);
  void gate_block(int64_t id, Stream* stream);

  void fail(int device, const std::string& text);  // the first failure stays
  void check(int device);                          // throws what it has failed with
  bool failed(int device);
  bool is_used(int device);

  // Sleeps as long as the copy takes, after those that are before it in its direction. False if
  // the queues are being drained.
  bool use_link(int device, Direction direction, size_t nbytes, double bytes_per_s);
  void set_link(double bytes_per_s);  // of the copies that are enqueued from now on
  double link();
  void set_deadline(double seconds);

  void reset();      // discards what is queued, and all errors and settings
  void shut_down();  // discards what is queued; all threads end

  std::mutex mutex;

 private:
  void loop(Stream* stream);
  void start(Stream* stream);
  void drain(std::unique_lock<std::mutex>& lock);
  std::string describe();

  std::condition_variable changed_;  // a mark is done, a gate opens, a stream is idle, draining
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams_;
  std::map<int64_t, std::shared_ptr<Gate>> gates_;
  std::array<Device, kDevices> devices_;
  int64_t next_stream_ = 1;
  int64_t next_gate_ = 1;
  double link_bytes_per_s_ = 0;
  double deadline_s_ = 60;
  std::atomic<bool> draining_{false};
  bool stopping_ = false;
};

// The calling thread's device, and its stream on each device.
int current_device();
void set_current_device(int device);
Stream* current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
void forget_thread_state();  // in a forked child

}  // namespace simdev
