#include "engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "clock.hpp"

namespace sdp {
namespace {
constexpr double kArrivalS = 2;  // how long a closed group waits for its device, for all operations

// Such bytes are NaN in every type of floating-point numbers: nothing takes them for a result.
void spoil_outputs(const Request& request) {
  for (const Piece& piece : request.recvs) {
    if (piece.count > 0) std::memset(piece.data, 0xFF, piece.count * itemsize(request.dtype));
  }
}
}  // namespace

Engine::Engine(std::shared_ptr<Communicator> communicator, int spin_us)
    : communicator_(std::move(communicator)) {
  foreground_.spin = SpinPolicy::of_callers(spin_us, communicator_->oversubscribed());
  background_.spin = SpinPolicy::background();
  background_.interrupt = [this] { communicator_->throw_if_failed(); };
  // Most of these come in close succession, and the program does not compute on CPUs.
  of_devices_ = {foreground_.spin, background_.interrupt};
}

Engine::~Engine() {
  close();
}

void Engine::run(const Request& request, const std::function<void()>& interrupt) {
  request.validate(communicator_->rank(), communicator_->world_size());
  communicator_->throw_if_failed();
  std::unique_lock lock(mutex_);
  refuse_reentry(request);
  if (busy_ || !queue_.empty()) {
    const auto work = enqueue(request);
    lock.unlock();
    wait_for_queue(*work, request, interrupt);
    return;
  }
  busy_ = true;
  OperationRecord record = record_of(request, nullptr);
  caller_ = std::this_thread::get_id();
  lock.unlock();
  Patience patience{foreground_.spin, [&] {
                      interrupt();
                      communicator_->throw_if_failed();
                    }};
  const auto release = [&] {
    lock.lock();
    busy_ = false;
    caller_ = {};
    lock.unlock();
    changed_.notify_all();
  };
  try {
    communicator_->run(request, patience, record);
  } catch (...) {
    release();
    throw;
  }
  release();
}

// The engine enforces the deadline of each operation; the caller also waits for queued operations.
void Engine::wait_for_queue(Work& work, const Request& request,
                            const std::function<void()>& interrupt) const {
  try {
    while (!work.wait(request.timeout_s, interrupt)) {
    }
  } catch (const Interrupted&) {
    communicator_->fail(communicator_->interruption(request.signature()));
    while (!work.completed()) usleep(1000);  // the engine must be done with the caller's memory
    throw;
  }
}

std::shared_ptr<Work> Engine::submit(Request request) {
  request.validate(communicator_->rank(), communicator_->world_size(), true);
  communicator_->throw_if_failed();
  const std::lock_guard lock(mutex_);
  refuse_reentry(request);
  return enqueue(std::move(request));
}

// A waiting caller runs signal handlers. An operation issued by a handler would have to wait for
// the operation below it on the same stack.
void Engine::refuse_reentry(const Request& request) const {
  if (caller_ != std::this_thread::get_id()) return;
  Failure failure(FailureKind::closed,
                  "called by a signal handler while this thread waits in another operation of the "
                  "group",
                  {}, Hint::after_handler);
  throw communicator_->peers().composed(failure.in(name(request.op)));
}

std::shared_ptr<Work> Engine::enqueue(Request request) {
  auto work = std::make_shared<Work>();
  if (stopping_) communicator_->throw_if_failed();
  if (!thread_.started()) thread_.start([this] { loop(); }, "sdp-engine");  // may throw
  OperationRecord record = record_of(request, work.get());
  record.issue();
  queue_.push_back({std::move(request), work, record});
  changed_.notify_all();
  return work;
}

OperationRecord Engine::record_of(const Request& request, const Work* work) {
  return {communicator_->flight(), communicator_->trace(), request, ++issued_, work};
}

void Engine::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || (!busy_ && !queue_.empty()); });
    if (queue_.empty()) return;  // stopping
    if (busy_) {                 // stopping while a caller runs its own operation: wait for its end
      changed_.wait(lock, [this] { return !busy_; });
      continue;
    }
    Item item = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::optional<Failure> failure;
    try {
      if (item.request.device_flags) {
        communicator_->await_device(item.request, of_devices_, item.record);
      }
      const Patience& patience = item.request.device_flags ? of_devices_ : background_;
      communicator_->run(item.request, patience, item.record);
    } catch (const Failure& error) {
      failure = error;
    } catch (const std::exception& error) {
      failure =
          communicator_->fail(communicator_->unexpected(error).in(item.request.signature(), {}, 0));
    }
    finish(item, std::move(failure));
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

// The device that arrives after a failure would overwrite what tells it of that. Its stream depends
// on nothing that is still in this queue, so it arrives unless it hangs, and then nothing waits for
// `done`. Once the group is closed, a caller waits for this thread.
void Engine::await_arrival(const DeviceFlags& flags) {
  for (useconds_t pause_us = 20; !flags.is_ready(); pause_us = std::min(2 * pause_us, 1000U)) {
    if (communicator_->closed()) {
      if (give_up_s_ == 0) give_up_s_ = now_s() + kArrivalS;
      if (now_s() > give_up_s_) return;
    }
    usleep(pause_us);
  }
}

// The one place where an operation in the queue ends, in the process that owns the group. The
// device goes on first: once the Work is done, its owner may free the flags; and callbacks, which
// may take long, must not hold up the device. So who sees `done` may use the memory, and finds the
// group failed if this operation has failed; only the Work itself may not know of its end yet.
void Engine::finish(const Item& item, std::optional<Failure> failure) {
  if (item.request.device_flags) {
    if (failure) {
      await_arrival(*item.request.device_flags);
      communicator_->await_access();
      spoil_outputs(item.request);
    }
    item.request.device_flags->set_done();
  }
  item.work->finish(std::move(failure));
}

std::uint64_t Engine::issued() const {
  return issued_.load();
}

void Engine::close() {
  communicator_->close();  // ends waits within kPeerCheckUs
  // In a forked child, a thread that does not exist there may hold the lock.
  if (!thread_.ours()) return;
  std::deque<Item> dropped;
  bool in_handler = false;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    in_handler = caller_ == std::this_thread::get_id();
    if (in_handler) dropped.swap(queue_);
  }
  changed_.notify_all();
  // If a signal handler calls this, the operation below it on the stack ends only after the handler
  // returns, and the engine's thread only after that operation: do not join the thread.
  for (const Item& item : dropped) finish(item, communicator_->closing());
  if (!in_handler) thread_.join();
}
}  // namespace sdp
