#include "communicator.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "clock.hpp"
#include "collectives/collectives.hpp"

namespace sdp {
namespace {
// How often a wait for a device looks: a word in memory wakes nobody.
constexpr double kMinDevicePollUs = 20;
constexpr double kMaxDevicePollUs = 200;
constexpr unsigned long kTimerSlackNs = 1'000;  // Linux adds 50 us to every sleep by default

int allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void dispatch(Operation& op) {
  if (op.request().part && op.request().part->compares_only) return compare(op);
  switch (op.request().op) {
    case Op::all_reduce:
      return all_reduce(op);
    case Op::reduce:
      return reduce(op);
    case Op::broadcast:
      return broadcast(op);
    case Op::all_gather:
      return all_gather(op);
    case Op::reduce_scatter:
      return reduce_scatter(op);
    case Op::gather:
      return gather(op);
    case Op::scatter:
      return scatter(op);
    case Op::all_to_all:
      return all_to_all(op);
    case Op::barrier:
      return barrier(op);
    case Op::send:
    case Op::recv:
      break;  // not collectives: PointToPoint runs them
  }
}
}  // namespace

Communicator::Communicator(Links links, std::size_t staging_bytes, int threads)
    : peers_(std::move(links), staging_bytes),
      regions_(peers_),
      helpers_(threads),
      oversubscribed_(peers_.world_size() > allowed_cores()),
      flight_(peers_.own().flight(), getpid()) {}

Failure Communicator::interruption(const OpSignature& operation) const {
  Failure failure(FailureKind::interrupted, "interrupted by a signal", {id()},
                  Hint::new_group_after_signal);
  return failure.in(operation, {}, 0);
}

Failure Communicator::unexpected(const std::exception& error) const {
  const bool no_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  const Hint hint = no_memory ? Hint::memory_of_aborter : Hint::new_group;
  return {FailureKind::aborted, error.what(), {id()}, hint};
}

Communicator::~Communicator() {
  close();
}

void Communicator::run(const Request& request, const Patience& patience, OperationRecord& record) {
  const auto ended = [&](const Failure& failure) {
    const Failure cause = fail(failure);  // first: until then, the flight recorder shows the wait
    record.end(&failure);
    return cause;
  };
  if (const auto why = failure()) throw ended(*why);
  record.begin();
  const Operation::Context context{peers_, regions_, patience, helpers_, last_completed_, record};
  Operation op(context, request, ++seq_, step_);
  try {
    dispatch(op);
  } catch (Failure& failure) {
    if (!failure.operation)
      failure.in(op.signature(), last_completed_, now_s() - record.started_s());
    throw ended(failure);
  } catch (const Interrupted&) {
    ended(interruption(op.signature()));
    throw;
  } catch (const std::exception& error) {
    throw ended(unexpected(error).in(op.signature(), {}, now_s() - record.started_s()));
  }
  record.event.path = static_cast<std::uint8_t>(op.path());
  record.end();
  last_path_.store(op.path());
  last_completed_ = {.op = request.op, .seq = op.shown_seq()};
}

// In the flight recorder, the operation stays queued meanwhile. A time-out blames this rank: to its
// peers, it is the one that does not arrive.
void Communicator::await_device(const Request& request, const Patience& patience,
                                OperationRecord& record) try {
  const DeviceFlags& flags = *request.device_flags;
  const double started_s = now_s();
  const double yield_s = 1e-6 * (patience.spin.pause_us + patience.spin.yield_us);
  double checked_s = 0;
  bool sleeps = false;
  while (!flags.is_ready()) {
    const double waited_s = now_s() - started_s;
    if (patience.interrupt) patience.interrupt();
    if (waited_s - checked_s >= 1e-6 * kPeerCheckUs) {
      // Without this rank, no peer can have completed the operation: none may have left.
      check_peers(request.signature(seq_ + 1), last_completed_, waited_s, true);
      checked_s = waited_s;
    }
    if (waited_s > request.timeout_s) {
      Failure late =
          peers_.blame(FailureKind::timeout, rank(),
                       "'s device has not reached the operation in " + seconds(request.timeout_s),
                       Hint::late_device);
      throw fail(late.in(request.signature(seq_ + 1), last_completed_, waited_s));
    }
    if (waited_s < yield_s) {
      sched_yield();
      continue;
    }
    if (!std::exchange(sleeps, true)) prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
    // A wait that has been long may well be longer: fewer looks cost the program less.
    usleep(
        static_cast<useconds_t>(std::clamp(0.05e6 * waited_s, kMinDevicePollUs, kMaxDevicePollUs)));
  }
} catch (const Failure& failure) {
  record.end(&failure);
  throw;
}

Failure Communicator::fail(const Failure& failure) {
  // A normal close is not a failure, and a forked child must not report for its parent.
  if (failure.kind == FailureKind::closed || closed() || !ours()) return peers_.composed(failure);
  const Failure raised = [&] {
    const std::lock_guard lock(cause_mutex_);
    if (cause_) return repeat_of_cause();
    cause_ = peers_.composed(failure);
    cause_->group = peers_.token();
    failed_.store(true);
    peers_.give_up(*cause_);
    return *cause_;
  }();
  peers_.await_access();
  return raised;
}

Failure Communicator::repeat_of_cause() const {
  Failure failure = *cause_;
  failure.is_repeat = true;
  return failure;
}

Failure Communicator::closing() const {
  return peers_.composed({FailureKind::closed, "the group is closed", {}, Hint::new_group});
}

std::optional<Failure> Communicator::failure() const {
  if (!ours()) return peers_.composed(forked());
  if (closed_.load()) return closing();
  if (!failed_.load()) return std::nullopt;  // without the lock: operations ask twice
  const std::lock_guard lock(cause_mutex_);
  return repeat_of_cause();
}

// Called in every operation: makes no copies unless the group has failed.
void Communicator::throw_if_failed() const {
  if (const auto why = failure()) throw *why;
}

void Communicator::check_peers(const OpSignature& operation, const OpSignature& last_completed,
                               double elapsed_s, bool all_are_needed) {
  throw_if_failed();
  const auto raise = [&](Failure why) { throw fail(why.in(operation, last_completed, elapsed_s)); };
  if (const auto crashed = peers_.crashed(); !crashed.empty()) raise(peers_.ended(crashed));
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank() || (!all_are_needed && peers_.state(r) != PeerState::failed)) continue;
    if (const auto cause = peers_.gave_up(r)) raise(*cause);
  }
}

void Communicator::await_access() {
  // Until this rank has left, accesses may begin; the thread that closes may not have come so far.
  if (closed()) peers_.leave();
  peers_.await_access();
}

void Communicator::close() {
  if (closed_.exchange(true)) return;
  if (!ours()) return;
  peers_.leave();
  peers_.await_access();
}

std::uint64_t Communicator::add_region(std::byte* data, std::uint64_t nbytes, int fd,
                                       std::uint64_t file_offset) {
  throw_if_failed();
  return peers_.in("register", [&] { return regions_.add(data, nbytes, fd, file_offset); });
}

Communicator::Shared Communicator::allocate(std::size_t nbytes, bool with_view) {
  throw_if_failed();
  return peers_.in("allocate", [&]() -> Shared {
    const FileDescriptor file(memfd_create("sdp-shared", MFD_CLOEXEC));
    if (file.get() < 0 || ftruncate(file.get(), static_cast<off_t>(nbytes)) != 0) {
      throw shared_memory_failure("cannot allocate " + std::to_string(nbytes) +
                                  " bytes of shared memory");
    }
    MappedFile mapped{Mapping(file.get(), nbytes, 0, false), Mapping()};
    if (with_view) mapped.view = Mapping::copy_on_write(file.get(), nbytes);
    std::byte* const data = mapped.shared.data();
    std::byte* const view = mapped.view.data();
    const std::uint64_t region = regions_.add(data, nbytes, file.get(), 0, with_view);
    const std::lock_guard lock(memory_mutex_);
    memory_.emplace(region, std::move(mapped));
    return {data, view, region};
  });
}

void Communicator::release(std::uint64_t region) {
  regions_.remove(region);
  const std::lock_guard lock(memory_mutex_);
  memory_.erase(region);
}
}  // namespace sdp
