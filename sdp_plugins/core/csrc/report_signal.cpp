#include "report_signal.hpp"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>

namespace sdp {
namespace {
// Globals, because a signal handler has no other state.
std::atomic<int> wakes{-1};
std::atomic<int> owner_pid{0};
std::atomic<int> inside{0};  // number of running handlers, which may be about to write

bool has_handler(const struct sigaction& action, void (*handler)(int)) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == handler;
}

void set_default(int number) {
  struct sigaction plain{};
  plain.sa_handler = SIG_DFL;
  sigaction(number, &plain, nullptr);
}

void on_signal(int number) {
  const int error = errno;
  inside.fetch_add(1);
  const int eventfd = wakes.load();
  if (getpid() != owner_pid.load() || eventfd < 0) {
    // This is a forked child, or other code has restored this handler after its removal.
    set_default(number);
    raise(number);  // delivered when this handler returns
  } else {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(eventfd, &one, sizeof one);
  }
  inside.fetch_sub(1);
  errno = error;
}
}  // namespace

bool take_report_signal(int number, int eventfd) {
  struct sigaction there{};
  if (sigaction(number, nullptr, &there) != 0) return false;
  if (!has_handler(there, SIG_DFL) && !has_handler(there, on_signal)) return false;
  wakes.store(eventfd);
  // A handler that ran during the fork continues in the parent only: do not wait for it here.
  if (owner_pid.exchange(getpid()) != getpid()) inside.store(0);
  struct sigaction ours{};
  ours.sa_handler = on_signal;
  ours.sa_flags = SA_RESTART;  // no system call of the program fails with EINTR
  return sigaction(number, &ours, nullptr) == 0;
}

void give_back_report_signal(int number) {
  struct sigaction there{};
  if (sigaction(number, nullptr, &there) != 0) return;
  if (has_handler(there, on_signal)) set_default(number);
  wakes.store(-1);
  while (getpid() == owner_pid.load() && inside.load() != 0) sched_yield();
}
}  // namespace sdp
