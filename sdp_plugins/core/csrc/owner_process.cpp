#include "owner_process.hpp"

#include <pthread.h>

#include <atomic>
#include <new>

namespace sdp {
namespace {
std::atomic<std::uint32_t> count{0};

struct Counting {
  Counting() {
    if (pthread_atfork(nullptr, nullptr, [] { ++count; }) != 0) throw std::bad_alloc();
  }
} const counting;
}  // namespace

std::uint32_t forks() {
  return count.load(std::memory_order_relaxed);
}
}  // namespace sdp
