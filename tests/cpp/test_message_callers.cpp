// Callers that move messages themselves, beside each other, beside the thread, and beside an end.
#include <atomic>
#include <random>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
// Polling as fits the cores, not at all, and longer than anything takes here.
const int kSpinsUs[] = {-1, 0, 20'000};

std::shared_ptr<Work> post_send(Rank& rank, Ints& buffer, std::uint32_t tag) {
  return rank.post(
      ranks::send(DType::int32, ranks::piece(buffer), 1 - rank.communicator->rank(), tag));
}

std::shared_ptr<Work> post_recv(Rank& rank, Ints& buffer, std::uint32_t tag) {
  return rank.post(
      ranks::recv(DType::int32, ranks::piece(buffer), 1 - rank.communicator->rank(), tag));
}

void exchange(Rank& rank, std::size_t count, std::uint32_t tag, int value) {
  Ints mine(count, value), theirs(count, -1);
  const auto sent = post_send(rank, mine, tag);
  const auto got = post_recv(rank, theirs, tag);
  ranks::expect_done(*got);
  ranks::expect_done(*sent);
  CHECK(theirs == Ints(count, value));
}
}  // namespace

// While it polls, ringing wakes nobody else: what comes for others is its task as well.
TEST(a_caller_whose_message_comes_last_moves_those_of_others) {
  for (int spin_us : kSpinsUs) {
    World world(2, ranks::kStagingBytes, spin_us);
    world.each([](int, Rank& rank) {
      std::thread patient([&] { exchange(rank, 10, 99, 7); });
      for (int m = 0; m < 60; ++m) exchange(rank, m % 4 == 3 ? kRingBytes : 100, 1, m);
      patient.join();
    });
    world.each([](int r, Rank& rank) {
      Ints last(3, -1), sent(3, 5);
      if (r == 1) {
        for (int m = 0; m < 60; ++m) exchange(rank, 1000, 1, m);
        ranks::expect_done(*post_send(rank, sent, 2));
        return;
      }
      const auto work = post_recv(rank, last, 2);
      std::thread patient([&] { ranks::expect_done(*work); });
      for (int m = 0; m < 60; ++m) exchange(rank, 1000, 1, m);
      patient.join();
      CHECK(last == Ints(3, 5));
    });
  }
}

// Each wait moves what it can for a moment and leaves the rest to the thread: messages that take
// longer than that, many callers at a time.
TEST(callers_come_and_go_while_the_rings_are_full) {
  constexpr int kThreads = 4;
  World world(2);
  world.each([](int r, Rank& rank) {
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int m = 0; m < 30; ++m) {
          Ints data(random() % 3 == 0 ? 3 * kRingBytes / 4 : random() % 500, m);
          const bool sends = (random() % 2 == 0) == (r == 0);
          const auto pause = std::chrono::microseconds(random() % 300);
          const auto work = sends ? post_send(rank, data, t) : post_recv(rank, data, t);
          std::this_thread::sleep_for(pause);
          ranks::expect_done(*work);
          CHECK(data == Ints(data.size(), m));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(an_end_reaches_all_callers_at_once) {
  for (int spin_us : kSpinsUs) {
    for (const char* how : {"close", "abort", "the peer's close"}) {
      World world(2, ranks::kStagingBytes, spin_us);
      constexpr int kThreads = 3;
      std::vector<Ints> buffers(kThreads, Ints(5));
      std::vector<std::thread> threads;
      std::atomic<int> failed{0};
      for (std::uint32_t t = 0; t < kThreads; ++t) {
        const auto work = post_recv(world[0], buffers[t], t);
        threads.emplace_back([&failed, work] { failed += ranks::failure_of(*work).has_value(); });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const double start = now_s();
      const std::string_view end(how);
      if (end == "close") world[0].close();
      if (end == "abort") world[0].abort("enough");
      if (end == "the peer's close") world[1].close();
      for (auto& thread : threads) thread.join();
      CHECK_EQ(failed.load(), kThreads);
      CHECK(now_s() - start < 1);
    }
  }
}
