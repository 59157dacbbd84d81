// What every rank sees when one of them does not come, ends, aborts or closes.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::all_reduce;
using ranks::expect_failure;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
constexpr double kAtOnceS = 1.0;  // within which a lost peer has to be noticed

Request barrier(double timeout_s = ranks::kTimeoutS) {
  Request made = ranks::request(Op::barrier, DType::uint8);
  made.timeout_s = timeout_s;
  return made;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
}  // namespace

TEST(ranks_that_do_not_arrive_are_named) {
  World world(4);
  std::atomic<int> waiting{2};
  const auto failures = world.failures([&](int r, Rank& rank) {
    rank.run(barrier());
    Ints buffer(3);
    Request request = all_reduce(buffer);
    if (r == 0) request.timeout_s = 0.3;  // rank 2 would wait much longer
    while (r % 2 == 1 && waiting.load() > 0) std::this_thread::yield();
    try {
      rank.run(std::move(request));
    } catch (...) {
      --waiting;
      throw;
    }
    rank.run(barrier());  // if what the late ones need was there, they hear of it now
  });
  expect_failure(failures[0], FailureKind::timeout, {1, 3}, "ranks 1, 3 did not arrive in 0.3 s");
  const std::string text = failures[0]->what();
  CHECK(contains(text,
                 "[rank 0/4] all_reduce #2 int32[3] sum: ranks 1, 3 did not arrive in 0.3 s; "
                 "rank 1 last announced barrier #1 (last completed: barrier #1). Hint: "));
  CHECK(failures[0]->elapsed_s >= 0.3 && failures[0]->op == "all_reduce" && failures[0]->seq == 2);
  for (int r : {1, 2, 3}) {
    const auto& late = failures[static_cast<std::size_t>(r)];
    expect_failure(late, FailureKind::timeout, {1, 3}, "rank 0 gave up: ");
    CHECK(contains(late->what(), "ranks 1, 3 did not arrive in 0.3 s"));
  }
}

// Else each rank of a large group would add a line to what it has heard from another.
TEST(a_cause_is_repeated_by_the_name_of_who_met_it) {
  World world(4);
  for (int r : {2, 1, 0}) {
    const auto failures = world.failures([&](int rank, Rank& place) {
      if (rank == r) place.run(barrier(r == 2 ? 0.2 : ranks::kTimeoutS));
    });
    const auto& failure = failures[static_cast<std::size_t>(r)];
    const std::string head = "[rank " + std::to_string(r) + "/4] barrier #1: ";
    const std::string cause = r == 2 ? "ranks 0, 1, 3 did not arrive in 0.2 s"
                                     : "rank 2 gave up: barrier #1: ranks 0, 1, 3 did not arrive";
    expect_failure(failure, FailureKind::timeout, {0, 1, 3}, head + cause);
  }
}

// Rank 1 announces the same operation, then does nothing.
TEST(a_rank_that_stalls_on_the_way_is_named) {
  World world(2);
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 1) {
      while (world[0].header().step.value.load() == 0) std::this_thread::yield();
      Peers& peers = rank.communicator->peers();
      peers.own().announcement(1) = peers.segment(0).announcement(1);
      rank.header().step.publish(1);
      return;
    }
    Ints buffer(30'000);
    Request request = all_reduce(buffer);
    request.timeout_s = 0.2;
    rank.run(std::move(request));
  });
  expect_failure(failures[0], FailureKind::timeout, {1}, "rank 1 arrived, but stalled for 0.2 s");
}

TEST(the_first_cause_stays) {
  World world(2);
  Rank& rank = world[0];
  for (int i = 0; i < 3; ++i) {
    try {
      rank.run(barrier(0.05));
      CHECK(false);
    } catch (const Failure& failure) {
      expect_failure(failure, FailureKind::timeout, {1}, "barrier #1: rank 1 did not arrive");
    }
  }
  rank.abort("too late to matter");
  CHECK_THROWS(rank.communicator->throw_if_failed(), Failure, "barrier #1");
}

TEST(a_rank_that_closes_is_missed_at_once) {
  World world(3);
  const double start = now_s();
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 1) return rank.close();
    Ints buffer(30'000);
    rank.run(all_reduce(buffer));
  });
  CHECK(now_s() - start < kAtOnceS);
  CHECK(!failures[1]);
  for (int r : {0, 2}) {
    expect_failure(failures[static_cast<std::size_t>(r)], FailureKind::peer_lost, {1},
                   "rank 1 has closed the group");
  }
}

// Its sockets hang up, as those of a process that ends do.
TEST(a_rank_that_ends_is_missed_at_once) {
  World world(3);
  const double start = now_s();
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 2) {
      rank = Rank{};
      return;
    }
    rank.run(barrier());
  });
  CHECK(now_s() - start < kAtOnceS);
  for (int r : {0, 1}) {
    const auto& failure = failures[static_cast<std::size_t>(r)];
    CHECK(failure && failure->kind == FailureKind::peer_lost);
    CHECK(failure->ranks == std::vector<int>{2});
  }
}

// A process that ends is noticed even if its children keep its sockets open.
TEST(a_process_that_is_killed_is_missed_at_once) {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pause();
    _exit(0);
  }
  ranks::Links links(2, ranks::kStagingBytes);
  sdp::Links mine = links.take(0);
  mine.pidfds[1] = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  CHECK(mine.pidfds[1] >= 0);
  Communicator communicator(std::move(mine), ranks::kStagingBytes);
  CHECK(communicator.peers().dead().empty());
  std::optional<double> killed_s;
  const Patience patience{SpinPolicy::background(), [&] {
                            if (!killed_s) {
                              kill(child, SIGKILL);
                              killed_s = now_s();
                            }
                          }};
  try {
    OperationRecord record(communicator.flight(), communicator.trace(), barrier(), 1, nullptr);
    communicator.run(barrier(), patience, record);
    CHECK(false);
  } catch (const Failure& failure) {
    expect_failure(failure, FailureKind::peer_lost, {1}, "barrier #1: rank 1 ended unexpectedly");
  }
  CHECK(now_s() - *killed_s < kAtOnceS);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
}

// Rank 0 needs nothing more from rank 1, however late it looks: done is done.
TEST(a_rank_that_has_done_its_part_may_go) {
  for (int round = 0; round < 100; ++round) {
    World world(2, ranks::kStagingBytes, 0);
    world.each([&](int r, Rank& rank) {
      Ints buffer(round % 2 == 0 ? 10 : 10'000, r + 1);
      rank.run(all_reduce(buffer));
      CHECK_EQ(buffer[0], 3);
      if (r == 1) rank.close();
    });
  }
}

TEST(abort_reaches_everybody_at_once) {
  World world(3);
  const double start = now_s();
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 1) {
      rank.abort("out of data. Hint: more epochs");
      rank.communicator->throw_if_failed();
    }
    rank.run(barrier());
  });
  CHECK(now_s() - start < kAtOnceS);
  expect_failure(failures[1], FailureKind::aborted, {1}, "out of data");
  for (int r : {0, 2}) {
    const auto& failure = failures[static_cast<std::size_t>(r)];
    expect_failure(failure, FailureKind::aborted, {1}, "barrier #1: rank 1 gave up: out of data");
    CHECK(contains(failure->what(), "out of data. Hint: more epochs"));
  }
}

TEST(a_cause_of_any_length_reaches_the_peers) {
  World world(2);
  const std::string reason(2000, 'x');
  std::vector<int> many(20, 1);
  world[0].communicator->fail(Failure(FailureKind::aborted, reason, many));
  const auto seen = world[1].communicator->peers().gave_up(0);
  CHECK(seen.has_value());
  const std::string text = world[1].communicator->peers().composed(*seen).summary();
  CHECK(contains(text, "rank 0 gave up: xxx"));
  CHECK(text.size() > 400 && text.size() < 600);
  CHECK_EQ(seen->ranks.size(), 8);
}

// Only the root reduces, so it alone finds out that it cannot.
TEST(what_an_operation_throws_aborts_the_group) {
  World world(2);
  const auto failures = world.failures([&](int, Rank& rank) {
    std::vector<std::uint8_t> buffer(8);
    Request request = ranks::in_place(Op::reduce, DType::boolean, ranks::piece(buffer), 0);
    request.reduce_op = ReduceOp::avg;
    rank.run(std::move(request));
    rank.run(barrier());
  });
  const std::string cause = "reduce #1 bool[8] avg root 0: reduction 'avg' is not defined for bool";
  expect_failure(failures[0], FailureKind::aborted, {0}, cause);
  expect_failure(failures[1], FailureKind::aborted, {0}, "barrier #2: rank 0 gave up: " + cause);
}

TEST(an_interrupt_passes_through_and_the_peers_lose_the_rank) {
  World world(2);
  std::atomic<bool> interrupted{false};
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 1) {
      while (!interrupted.load()) std::this_thread::yield();
      rank.run(barrier());  // rank 0 had arrived
      return rank.run(barrier());
    }
    try {
      rank.engine->run(barrier(), [] { throw Interrupted{}; });
      CHECK(false);
    } catch (const Interrupted&) {
      interrupted = true;
    }
    rank.run(barrier());
  });
  expect_failure(failures[0], FailureKind::interrupted, {0}, "barrier #1: interrupted");
  expect_failure(failures[1], FailureKind::peer_lost, {0},
                 "rank 0 gave up: barrier #1: interrupted");
}

TEST(closing_wakes_whoever_waits) {
  World world(2);
  std::thread closer([&] {
    while (world[0].header().step.value.load() == 0) std::this_thread::yield();
    world[0].communicator->close();
  });
  const double start = now_s();
  const auto failures = world.failures([&](int r, Rank& rank) {
    if (r == 0) rank.run(barrier());
  });
  closer.join();
  CHECK(now_s() - start < kAtOnceS);
  expect_failure(failures[0], FailureKind::closed, {}, "[rank 0/2] the group is closed");
  CHECK_THROWS(world[0].run(barrier()), Failure, "the group is closed. Hint: make a new group.");
  world[0].close();
  world[0].close();
}

TEST(a_forked_child_must_not_communicate_and_does_not_close_for_its_parent) {
  World world(2);
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      world[0].run(barrier());
    } catch (const Failure& failure) {
      status = contains(failure.what(), "forked") ? 0 : 2;
    }
    world[0].close();
    world[1].abort("by the child");
    _exit(status);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  world.each([](int, Rank& rank) { rank.run(barrier()); });
}

TEST(who_gives_up_waits_for_peers_in_its_memory) {
  World world(2);
  std::atomic<bool> returned = false;
  std::thread other;
  {
    const PeerMemoryAccess access(world[1].communicator->peers());
    other = std::thread([&] {
      world[0].abort("enough");
      returned = true;
    });
    while (world[0].communicator->peers().state(0) != PeerState::failed) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(!returned);
  }
  other.join();
  world[0].close();
  world[1].close();
}

TEST(faults_of_the_call_leave_the_group_as_it_was) {
  World world(2);
  world.each([&](int r, Rank& rank) {
    Ints buffer(4, r);
    Request no_root = ranks::in_place(Op::broadcast, DType::int32, ranks::piece(buffer), 2);
    CHECK_THROWS(rank.run(no_root), std::invalid_argument,
                 "root 2 is not a rank of this group of 2");
    Request no_output = ranks::request(Op::all_gather, DType::int32);
    no_output.sends = {ranks::piece(buffer)};
    CHECK_THROWS(rank.run(no_output), std::invalid_argument, "needs 2 output buffer(s), got 0");
    CHECK_THROWS(rank.submit(no_output), std::invalid_argument, "all_gather");
    CHECK_THROWS(rank.post(ranks::send(DType::int32, ranks::piece(buffer), r)),
                 std::invalid_argument, "is not another rank");
    CHECK_THROWS(rank.post(ranks::recv(DType::int32, ranks::piece(buffer), 7)),
                 std::invalid_argument, "source 7 is not another rank");
    rank.run(all_reduce(buffer));
    CHECK(buffer == Ints(4, 1));
  });
}

TEST(rank_lists_read_well) {
  CHECK_EQ(rank_list({3}), "rank 3");
  CHECK_EQ(rank_list({3, 4}), "ranks 3, 4");
  CHECK_EQ(rank_list({3, 4, 5}), "ranks 3-5");
  CHECK_EQ(rank_list({0, 2, 3, 4, 7, 8}), "ranks 0, 2-4, 7, 8");
}
