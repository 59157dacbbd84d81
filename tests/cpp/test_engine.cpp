// Operations of a group in the order issued, in the caller's thread or the engine's; and that no
// Work is ever left behind.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
Request sum(Ints& buffer) {
  return ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer));
}
Request barrier() {
  return ranks::request(Op::barrier, DType::uint8);
}
// On every rank, of what all ranks have in `from`.
Request sum_into(Ints& to, Ints& from, int world) {
  Request made = ranks::request(Op::reduce_scatter, DType::int32);
  made.sends.assign(static_cast<std::size_t>(world), ranks::piece(from));
  made.recvs = {ranks::piece(to)};
  return made;
}
// Threads of this process by that name.
int threads_named(const std::string& name) {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string theirs;
    std::getline(std::ifstream(task.path() / "comm"), theirs);
    count += theirs == name ? 1 : 0;
  }
  return count;
}
}  // namespace

// The engine's thread starts with the first operation that it has to run.
TEST(a_blocking_call_on_an_idle_group_runs_in_the_caller_s_thread) {
  World world(2);
  world.each([](int, Rank& rank) { rank.run(barrier()); });
  CHECK_EQ(threads_named("sdp-engine"), 0);
  world.each([](int, Rank& rank) { ranks::expect_done(*rank.submit(barrier())); });
  CHECK_EQ(threads_named("sdp-engine"), 2);
}

// Each operation reads what the one before has written, and is done when a later one is.
TEST(queued_and_blocking_operations_keep_their_order) {
  constexpr std::size_t kOperations = 10;
  World world(3);
  world.each([](int r, Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      std::vector<Ints> chain{Ints(9000, r)};
      chain.resize(kOperations + 1, Ints(9000, -1));
      std::vector<std::shared_ptr<Work>> works;
      const auto all_done = [&] {
        return std::all_of(works.begin(), works.end(),
                           [](auto& work) { return work->completed(); });
      };
      for (std::size_t i = 0; i < kOperations; ++i) {
        Request request = sum_into(chain[i + 1], chain[i], 3);
        // Long and short ones in turn.
        if (i % 3 != 0) request.recvs[0].count = 10;
        for (Piece& piece : request.sends) piece.count = request.recvs[0].count;
        if (i % 4 == 3) {
          rank.run(std::move(request));
          CHECK(all_done());
        } else {
          works.push_back(rank.submit(std::move(request)));
        }
      }
      ranks::expect_done(*works.back());
      CHECK(all_done());
      std::int32_t expected = 3;  // 0 + 1 + 2
      for (std::size_t i = 1; i <= kOperations; ++i, expected *= 3) {
        CHECK_EQ(chain[i].front(), expected);
      }
    }
  });
}

TEST(several_threads_of_a_rank_may_call) {
  constexpr int kThreads = 3;
  constexpr int kCalls = 30;
  World world(2);
  world.each([](int, Rank& rank) {
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int t = 0; t < kThreads; ++t) {
      callers.emplace_back([&] {
        for (int i = 0; i < kCalls; ++i) {
          Ints buffer(50, 1);
          // All issue the same operation, so it does not matter whose meets whose.
          if (i % 3 == 0) {
            ranks::expect_done(*rank.submit(sum(buffer)));
          } else {
            rank.run(sum(buffer));
          }
          if (buffer != Ints(50, 2)) ++wrong;
        }
      });
    }
    for (auto& caller : callers) caller.join();
    CHECK_EQ(wrong.load(), 0);
  });
}

TEST(wait_gives_up_in_time_and_the_operation_goes_on) {
  World world(2);
  const auto work = world[0].submit(barrier());
  CHECK(!work->wait(0));
  CHECK(!work->wait(0.02));
  CHECK(!work->completed() && !work->failure());
  int interrupts = 0;
  CHECK(!work->wait(0.25, [&] { ++interrupts; }));
  CHECK(interrupts > 0);
  world[1].run(barrier());
  CHECK(work->wait(ranks::kTimeoutS));
  CHECK(work->completed() && !work->failure());
  CHECK_EQ(work->source_rank(), -1);
  CHECK(work->wait(0));
}

TEST(a_failure_reaches_every_queued_work) {
  World world(2);
  std::vector<std::shared_ptr<Work>> works;
  Request first = barrier();
  first.timeout_s = 0.1;
  works.push_back(world[0].submit(first));
  Ints buffer(10);
  for (int i = 0; i < 5; ++i) works.push_back(world[0].submit(sum(buffer)));
  for (const auto& work : works) {
    const auto failure = ranks::failure_of(*work);
    CHECK(failure && failure->kind == FailureKind::timeout);
    CHECK_EQ(failure->seq, 1);  // the first cause, for all of them
    CHECK(work->failure().has_value());
  }
  CHECK_THROWS(world[0].submit(barrier()), Failure, "barrier #1");
  CHECK_THROWS(world[0].run(barrier()), Failure, "barrier #1");
}

TEST(closing_fails_what_is_queued_and_ends_the_thread) {
  World world(2);
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 5; ++i) works.push_back(world[0].submit(barrier()));
  const double start = now_s();
  world[0].engine->close();
  CHECK(now_s() - start < 1);
  for (const auto& work : works) {
    CHECK(work->completed());
    CHECK(work->failure() && work->failure()->kind == FailureKind::closed);
  }
  CHECK_THROWS(world[0].submit(barrier()), Failure, "closed");
  world[0].engine->close();
}

TEST(a_group_may_be_dropped_while_operations_are_pending) {
  std::vector<std::shared_ptr<Work>> works;
  {
    World world(2);
    for (int i = 0; i < 3; ++i) works.push_back(world[0].submit(barrier()));
  }
  for (const auto& work : works) CHECK(work->completed() && work->failure());
}

TEST(closing_while_threads_submit_leaves_no_work_behind) {
  for (int round = 0; round < 10; ++round) {
    World world(2);
    std::vector<std::thread> submitters;
    std::atomic<int> submitted{0};
    for (int t = 0; t < 2; ++t) {
      submitters.emplace_back([&] {
        std::vector<std::shared_ptr<Work>> works;
        Ints buffer(1);
        try {
          while (true) {
            works.push_back(world[0].submit(barrier()));
            works.push_back(world[0].post(ranks::recv(DType::int32, ranks::piece(buffer), 1)));
            ++submitted;
          }
        } catch (const Failure&) {
        }
        for (const auto& work : works) ranks::failure_of(*work);  // throws if one never ends
      });
    }
    while (submitted.load() < 5) std::this_thread::yield();
    world[0].close();
    for (auto& submitter : submitters) submitter.join();
  }
}

TEST(an_interrupt_in_the_queue_waits_for_the_engine_to_let_go) {
  World world(2);
  Ints buffer(10);
  const auto first = world[0].submit(barrier());
  try {
    world[0].engine->run(sum(buffer), [] { throw Interrupted{}; });
    CHECK(false);
  } catch (const Interrupted&) {
  }
  CHECK(first->completed());  // the engine has nothing of ours any more
  CHECK_EQ(world[0].communicator->peers().own().announcement(2).seq,
           0);  // nor has it begun anything
  CHECK_THROWS(world[0].run(barrier()), Failure, "interrupted");
}

// Such as bad_alloc, in the middle of an operation.
TEST(an_exception_of_the_core_names_the_operation_and_a_remedy) {
  World world(2);
  CHECK_THROWS(world[0].engine->run(barrier(), [] { throw std::bad_alloc(); }), Failure,
               "[rank 0/2] barrier #1: std::bad_alloc. Hint: memory has run out");
}

// A signal handler runs on the stack of the call that waits: a second one could never begin.
TEST(a_call_inside_a_waiting_call_is_refused) {
  World world(2);
  int refused = 0;
  world.each([&](int r, Rank& rank) {
    if (r == 1) {
      while (world[0].header().step.value.load() == 0) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
      return rank.run(barrier());
    }
    rank.engine->run(barrier(), [&] {
      CHECK_THROWS(rank.run(barrier()), Failure, "signal handler");
      CHECK_THROWS(rank.submit(barrier()), Failure, "signal handler");
      ++refused;
    });
  });
  CHECK(refused > 0);
  world.each([](int, Rank& rank) { rank.run(barrier()); });  // nothing is lost
}

TEST(what_an_operation_throws_in_the_engine_s_thread_fails_the_work) {
  World world(1);
  std::vector<std::uint8_t> buffer(8);
  Request request = ranks::in_place(Op::all_reduce, DType::boolean, ranks::piece(buffer));
  request.reduce_op = ReduceOp::avg;
  const auto failure = ranks::failure_of(*world[0].submit(request));
  CHECK(failure && failure->kind == FailureKind::aborted);
  CHECK(std::strstr(failure->what(), "'avg' is not defined for bool") != nullptr);
}

namespace {
// New threads ask for this much stack while it lives.
class StackSize {
 public:
  explicit StackSize(std::size_t nbytes) {
    pthread_getattr_default_np(&before_);
    pthread_attr_t changed = before_;
    pthread_attr_setstacksize(&changed, nbytes);
    CHECK_EQ(pthread_setattr_default_np(&changed), 0);
  }
  ~StackSize() { pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t before_;
};
}  // namespace

TEST(if_no_thread_can_start_the_call_fails_and_signals_stay_unblocked) {
  World world(1);
  Ints buffer(1);
  {
    const StackSize too_much(std::size_t{1} << 50);
    CHECK_THROWS(world[0].submit(barrier()), std::system_error, "unavailable");
  }
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK_EQ(sigismember(&blocked, SIGINT), 0);
  world[0].run(barrier());
  ranks::expect_done(*world[0].submit(barrier()));
}
