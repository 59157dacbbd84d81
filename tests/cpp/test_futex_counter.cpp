// The counter in shared memory that ranks wait on.
#include <atomic>
#include <cmath>
#include <thread>

#include "check.hpp"
#include "clock.hpp"
#include "futex_counter.hpp"
#include "spin_wait.hpp"

using namespace sdp;

namespace {
constexpr std::uint32_t kSecond = 1'000'000;

// As Operation does it, but patient.
void wait_for(FutexCounter& signal, std::uint32_t target, const SpinPolicy& policy) {
  if (spin_until(signal, target, policy)) return;
  while (true) {
    const std::uint32_t seen = signal.value.load(std::memory_order_acquire);
    if (signal.reached(target)) return;
    signal.sleep(seen, kSecond);
  }
}

const SpinPolicy kPolicies[] = {{0, 0},
                                {50, 0},
                                {0, 50},
                                SpinPolicy::of_callers(-1, false),
                                SpinPolicy::of_callers(-1, true),
                                SpinPolicy::background()};
}  // namespace

TEST(reached_compares_by_distance_also_over_the_wrap) {
  FutexCounter signal{};
  for (std::uint32_t base : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
    signal.value = base;
    for (std::uint32_t ahead : {1u, 2u, 1000u, 0x7fffffffu}) {
      CHECK(!signal.reached(base + ahead));
      CHECK(signal.reached(base - ahead));
    }
    CHECK(signal.reached(base));
  }
}

TEST(what_was_written_before_publish_is_seen_after_the_wait) {
  for (const SpinPolicy& policy : kPolicies) {
    FutexCounter there{}, back{};
    std::uint32_t plain = 0;  // not atomic: ThreadSanitizer watches
    constexpr std::uint32_t kSteps = 500;
    const std::uint32_t start = 0u - kSteps / 2;  // wraps on the way
    there.value = back.value = start;
    std::thread peer([&] {
      for (std::uint32_t i = 1; i <= kSteps; ++i) {
        wait_for(there, start + i, policy);
        CHECK_EQ(plain, i);
        plain = 0;
        back.publish(start + i);
      }
    });
    for (std::uint32_t i = 1; i <= kSteps; ++i) {
      plain = i;
      there.publish(start + i);
      wait_for(back, start + i, policy);
      CHECK_EQ(plain, 0);
    }
    peer.join();
  }
}

TEST(sleepers_are_woken_at_once_and_counted_out) {
  FutexCounter signal{};
  std::atomic<int> awake{0};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back([&] {
      wait_for(signal, 1, {0, 0});
      ++awake;
    });
  }
  while (signal.sleepers.load() < 4) std::this_thread::yield();
  const double start = now_s();
  signal.publish(1);
  for (auto& sleeper : sleepers) sleeper.join();
  CHECK(now_s() - start < 0.9);  // their own slices last a second
  CHECK_EQ(awake.load(), 4);
  CHECK_EQ(signal.sleepers.load(), 0);
}

TEST(wake_makes_sleepers_look_again_without_progress) {
  FutexCounter signal{};
  std::thread sleeper([&] { signal.sleep(0, 30 * kSecond); });
  while (signal.sleepers.load() == 0) std::this_thread::yield();
  const double start = now_s();
  while (signal.sleepers.load() != 0) {  // it may not be in the kernel yet
    signal.wake();
    std::this_thread::yield();
  }
  sleeper.join();
  CHECK(now_s() - start < 10);
  CHECK_EQ(signal.value.load(), 0);
}

TEST(sleep_returns_at_once_if_the_value_has_changed_and_in_time_if_not) {
  FutexCounter signal{};
  signal.value = 7;
  double start = now_s();
  signal.sleep(6, 30 * kSecond);
  CHECK(now_s() - start < 10);
  start = now_s();
  signal.sleep(7, 20'000);
  CHECK(now_s() - start >= 0.019);
}

TEST(bumps_of_several_writers_are_all_counted) {
  FutexCounter bell{};
  bell.value = 0xffffff00u;
  std::vector<std::thread> writers;
  for (int w = 0; w < 4; ++w) {
    writers.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) bell.bump();
    });
  }
  wait_for(bell, 0xffffff00u + 4000, SpinPolicy::background());
  for (auto& writer : writers) writer.join();
  CHECK_EQ(bell.value.load(), 0xffffff00u + 4000);
}

TEST(spinning_ends_when_the_policy_says) {
  FutexCounter signal{};
  for (const SpinPolicy& policy : kPolicies) {
    const double start = now_s();
    CHECK(!spin_until(signal, 1, policy));
    CHECK(now_s() - start >= 1e-6 * policy.pause_us);
    CHECK(spin_until(signal, 0, policy));
  }
}
