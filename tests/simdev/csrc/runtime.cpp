// Streams, marks, gates, errors, and the ends of processes.
#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <stdexcept>

#include "memory.h"

namespace simdev {
namespace {

// Long enough that a training loop keeps its threads, short enough that a test's are soon gone.
constexpr auto kIdle = std::chrono::milliseconds(300);

std::atomic<Runtime*> g_runtime{nullptr};
std::once_flag g_fork_handler;

void in_forked_child() {
  // The parent's threads do not exist here, and its locks may be held for ever.
  g_runtime.store(nullptr);
  forget_thread_state();
  forget_memory();
  forget_host();
}

std::chrono::steady_clock::time_point point(double time_s) {
  return std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(time_s)));
}

}  // namespace

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Runtime& Runtime::get() {
  Runtime* runtime = g_runtime.load();
  if (runtime == nullptr) {
    std::call_once(g_fork_handler, [] { pthread_atfork(nullptr, nullptr, in_forked_child); });
    auto* made = new Runtime();  // never destroyed: tensors may outlive every static object
    if (g_runtime.compare_exchange_strong(runtime, made)) return *made;
    delete made;
  }
  return *runtime;
}

Runtime::Runtime() {
  for (int device = 0; device < kDevices; ++device) {
    streams_[{device, 0}] = std::make_unique<Stream>(device, 0);
  }
}

Stream* Runtime::find(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams_.find({device, id});
  if (found == streams_.end()) {
    throw std::runtime_error("simdev: this process has no stream " + std::to_string(id) +
                             " on device " + std::to_string(device));
  }
  return found->second.get();
}

Stream* Runtime::from_handle(uint64_t handle) {
  if (handle == 0) return find(current_device(), 0);
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [key, stream] : streams_) {
    if (reinterpret_cast<uint64_t>(stream.get()) == handle) return stream.get();
    if (key.second != 0 && static_cast<uint64_t>(key.second) == handle) return stream.get();
  }
  return nullptr;
}

Stream* Runtime::create(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t id = next_stream_++;
  auto& stream = streams_[{device, id}];
  stream = std::make_unique<Stream>(device, id);
  return stream.get();
}

std::vector<Stream*> Runtime::all(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Stream*> found;
  for (auto& [key, stream] : streams_) {
    if (device == -1 || key.first == device) found.push_back(stream.get());
  }
  return found;
}

void Runtime::start(Stream* stream) {
  if (stream->thread.joinable()) stream->thread.join();  // it has left its loop already
  stream->alive = true;
  stream->thread = std::thread([this, stream] { loop(stream); });
}

void Runtime::enqueue(Stream* stream, Kind kind, const char* what, std::function<void()> run) {
  std::lock_guard<std::mutex> lock(mutex);
  Device& device = devices_[stream->device];
  device.used = true;
  if (kind == Kind::kWork) {
    if (!device.error.empty()) throw std::runtime_error(device.error);
    if (stream->failing) {
      stream->failing = false;
      run = [this, index = stream->device, text = stream->fail_text] { fail(index, text); };
    }
  }
  if (stopping_) {
    if (kind == Kind::kMark) run();
    return;
  }
  stream->queue.push_back({kind, std::move(run), what});
  if (!stream->alive) {
    start(stream);
  } else {
    stream->arrived.notify_one();
  }
}

void Runtime::loop(Stream* stream) {
  pthread_setname_np(pthread_self(), "simdev");
  set_current_device(stream->device);
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    if (!stream->arrived.wait_for(lock, kIdle,
                                  [&] { return !stream->queue.empty() || stopping_; }) ||
        (stopping_ && stream->queue.empty())) {
      break;
    }
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    stream->doing = task.what;
    bool skip = draining_ || !devices_[stream->device].error.empty();
    if (task.kind == Kind::kMark) {
      task.run();  // under the lock
      changed_.notify_all();
    } else if (!skip) {
      lock.unlock();
      try {
        task.run();
      } catch (const std::exception& error) {
        std::string text = error.what();
        text = text.substr(0, text.find("\nException raised from"));  // no backtrace
        if (text.rfind("simdev: ", 0) != 0)
          text = std::string("simdev: ") + task.what + ": " + text;
        fail(stream->device, text);
      }
      task.run = nullptr;  // what it holds goes before the next task begins
      lock.lock();
    }
    stream->busy = false;
    stream->doing = "";
    if (stream->queue.empty()) changed_.notify_all();
  }
  stream->alive = false;
  changed_.notify_all();
}

MarkPtr Runtime::mark(Stream* stream) {
  auto made = std::make_shared<Mark>();
  enqueue(stream, Kind::kMark, "event", [made] {
    made->time_s = now_s();
    made->done = true;
  });
  return made;
}

void Runtime::wait_mark(Stream* stream, MarkPtr mark) {
  enqueue(stream, Kind::kInternal, "waits for an event",
          [this, mark = std::move(mark)] { wait_until([&] { return mark->done; }); });
}

bool Runtime::is_idle(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return stream->queue.empty() && !stream->busy;
}

bool Runtime::is_done(const MarkPtr& mark) {
  std::lock_guard<std::mutex> lock(mutex);
  return mark == nullptr || mark->done;
}

void Runtime::synchronize(Stream* stream) {
  host_wait(mark(stream), stream->device);
}

void Runtime::synchronize_device(int device) {
  std::vector<MarkPtr> marks;
  for (Stream* stream : all(device)) {
    if (!is_idle(stream)) marks.push_back(mark(stream));
  }
  for (const MarkPtr& each : marks) host_wait(each, device);
  check(device);
}

void Runtime::host_wait(const MarkPtr& mark, int device) {
  {
    std::unique_lock<std::mutex> lock(mutex);
    auto deadline = point(now_s() + deadline_s_);
    if (mark != nullptr && !changed_.wait_until(lock, deadline, [&] { return mark->done; })) {
      throw std::runtime_error("simdev: the host has waited " + std::to_string(deadline_s_) +
                               " s for a stream; " + describe());
    }
  }
  check(device);
}

std::string Runtime::describe() {
  std::ostringstream text;
  text << "streams at work:";
  for (auto& [key, stream] : streams_) {
    if (stream->busy || !stream->queue.empty()) {
      text << " [device " << key.first << " stream " << key.second << ": " << stream->doing
           << ", then " << stream->queue.size() << " more]";
    }
  }
  return text.str();
}

bool Runtime::wait_until(const std::function<bool()>& ready) {
  std::unique_lock<std::mutex> lock(mutex);
  changed_.wait(lock, [&] { return ready() || draining_; });
  return !draining_;
}

bool Runtime::sleep_until(double time_s) {
  std::unique_lock<std::mutex> lock(mutex);
  return !changed_.wait_until(lock, point(time_s), [&] { return draining_.load(); });
}

int64_t Runtime::gate_create() {
  std::lock_guard<std::mutex> lock(mutex);
  gates_[next_gate_] = std::make_shared<Gate>();
  return next_gate_++;
}

void Runtime::gate_open(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = gates_.find(id);
  if (found != gates_.end()) found->second->open = true;
  changed_.notify_all();
}

void Runtime::gate_block(int64_t id, Stream* stream) {
  std::shared_ptr<Gate> gate;
  {
    std::lock_guard<std::mutex> lock(mutex);
    gate = gates_.at(id);
  }
  enqueue(stream, Kind::kInternal, "waits at a gate",
          [this, gate] { wait_until([&] { return gate->open; }); });
}

void Runtime::fail(int device, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (devices_[device].error.empty()) devices_[device].error = text;
  changed_.notify_all();
}

void Runtime::check(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!devices_[device].error.empty()) throw std::runtime_error(devices_[device].error);
}

bool Runtime::failed(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return !devices_[device].error.empty();
}

bool Runtime::is_used(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return devices_[device].used;
}

bool Runtime::use_link(int device, Direction direction, size_t nbytes, double bytes_per_s) {
  if (bytes_per_s <= 0) return true;
  double end_s;
  {
    std::lock_guard<std::mutex> lock(mutex);
    double& free_s = devices_[device].link_free_s[direction];
    free_s = std::max(free_s, now_s()) + static_cast<double>(nbytes) / bytes_per_s;
    end_s = free_s;
  }
  return sleep_until(end_s);
}

void Runtime::set_link(double bytes_per_s) {
  std::lock_guard<std::mutex> lock(mutex);
  link_bytes_per_s_ = bytes_per_s;
}

double Runtime::link() {
  std::lock_guard<std::mutex> lock(mutex);
  return link_bytes_per_s_;
}

void Runtime::set_deadline(double seconds) {
  std::lock_guard<std::mutex> lock(mutex);
  deadline_s_ = seconds;
}

void Runtime::drain(std::unique_lock<std::mutex>& lock) {
  draining_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return std::all_of(streams_.begin(), streams_.end(),
                       [](auto& each) { return each.second->queue.empty() && !each.second->busy; });
  });
}

void Runtime::reset() {
  std::unique_lock<std::mutex> lock(mutex);
  drain(lock);
  draining_ = false;
  for (Device& device : devices_) {
    device.error.clear();
    device.link_free_s = {};
  }
  for (auto& [key, stream] : streams_) {
    stream->failing = false;
    stream->capturing = false;
  }
  gates_.clear();
  link_bytes_per_s_ = 0;
  deadline_s_ = 60;
}

void Runtime::shut_down() {
  std::unique_lock<std::mutex> lock(mutex);
  drain(lock);
  stopping_ = true;
  for (auto& [key, stream] : streams_) {
    stream->arrived.notify_all();
    if (!stream->thread.joinable()) continue;
    std::thread ending = std::move(stream->thread);
    lock.unlock();
    ending.join();
    lock.lock();
  }
}

}  // namespace simdev
