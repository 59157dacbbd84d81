// Operations that start at a flag which a device writes, and end by a flag which it waits for. Here
// the device is the test.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::expect_failure;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
constexpr double kAtOnceS = 1.0;   // within which a failure has to be noticed
constexpr double kArrivalS = 2.0;  // how long a closed group waits for its device
constexpr std::int32_t kSpoilt = -1;

struct Flags {
  std::uint32_t ready = 0, done = 0;

  void write_ready(std::uint32_t value) {
    std::atomic_ref(ready).store(value, std::memory_order_release);
  }
  bool is_done(std::uint32_t value) {
    const std::uint32_t seen = std::atomic_ref(done).load(std::memory_order_acquire);
    return static_cast<std::int32_t>(seen - value) >= 0;
  }
};

Request flagged(Ints& buffer, Flags& flags, std::uint32_t value = 1) {
  Request made = ranks::all_reduce(buffer);
  made.device_flags = DeviceFlags{&flags.ready, &flags.done, value};
  return made;
}

// Longer than the engine spins.
void let_it_wait() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// An operation of rank 0 whose device comes late, or never.
struct Stuck {
  Ints buffer = Ints(10'000, 7);
  Flags flags;
  std::shared_ptr<Work> work;

  void submit(Rank& rank, double timeout_s = ranks::kTimeoutS) {
    Request request = flagged(buffer, flags);
    request.timeout_s = timeout_s;
    work = rank.submit(std::move(request));
  }
  // After a failure, the device arrives as if nothing had happened.
  void arrive_and_expect_released() {
    CHECK(!flags.is_done(1));
    std::fill(buffer.begin(), buffer.end(), 7);
    flags.write_ready(1);
    expect_released();
  }
  // The flag alone says that nobody uses the memory any more.
  void expect_released() {
    CHECK_UNTIL(flags.is_done(1));
    CHECK(buffer == Ints(10'000, kSpoilt) && flags.done == 1);
  }
};
}  // namespace

// Of every way that a sum can take: inlined, staged, in registered memory.
TEST(an_operation_starts_and_ends_at_its_flags) {
  World world(3);
  for (std::size_t count : {1U, 1000U, 100'000U}) {
    world.each([&](int r, Rank& rank) {
      Ints buffer(count, kSpoilt);
      Flags flags;
      const auto work = rank.submit(flagged(buffer, flags));
      let_it_wait();
      CHECK(!flags.is_done(1) && !work->completed());
      CHECK(buffer == Ints(count, kSpoilt));
      std::fill(buffer.begin(), buffer.end(), r + 1);  // the device's copy
      flags.write_ready(1);
      CHECK_UNTIL(flags.is_done(1));
      CHECK(buffer == Ints(count, 6));
      ranks::expect_done(*work);
    });
  }
}

TEST(registered_memory_is_summed_in_place) {
  World world(2);
  world.each([&](int r, Rank& rank) {
    constexpr std::size_t kCount = 300'000;
    auto* const data =
        reinterpret_cast<std::int32_t*>(rank.communicator->allocate(4 * kCount).data);
    Flags flags;
    for (std::uint32_t value = 1; value < 5; ++value) {
      Request request = ranks::in_place(Op::all_reduce, DType::int32,
                                        {reinterpret_cast<std::byte*>(data), kCount});
      request.device_flags = DeviceFlags{&flags.ready, &flags.done, value};
      const auto work = rank.submit(request);
      std::fill(data, data + kCount, r + 1);
      flags.write_ready(value);
      CHECK_UNTIL(flags.is_done(value));
      CHECK(std::all_of(data, data + kCount, [](std::int32_t sum) { return sum == 3; }));
      ranks::expect_done(*work);
    }
  });
}

// A peer whose device is early waits for this rank as for any that is late.
TEST(ranks_may_mix_operations_with_flags_and_without) {
  World world(2);
  world.each([&](int r, Rank& rank) {
    for (int round = 0; round < 20; ++round) {
      Ints buffer(100, r + 1), other(100, r + 1);
      Flags flags;
      if (r == 0) {
        const auto work = rank.submit(flagged(buffer, flags));
        if (round % 2 == 0) let_it_wait();
        flags.write_ready(1);
        rank.run(ranks::all_reduce(other));  // behind it in the queue
        CHECK(flags.is_done(1) && work->completed());
      } else {
        rank.run(ranks::all_reduce(buffer));
        rank.run(ranks::all_reduce(other));
      }
      CHECK(buffer == Ints(100, 3) && other == Ints(100, 3));
    }
  });
}

// One pair of words for a stream of operations, whose values pass zero and the sign bit.
TEST(queued_operations_end_in_order_while_the_value_wraps_around) {
  constexpr std::uint32_t kOperations = 40;
  for (const std::uint32_t first : {0xFFFFFFF0U, 0x7FFFFFF0U}) {
    World world(2);
    world.each([&](int r, Rank& rank) {
      Flags flags{first - 1, first - 1};
      std::vector<Ints> buffers(kOperations, Ints(2000, r));
      std::vector<std::shared_ptr<Work>> works;
      for (std::uint32_t i = 0; i < kOperations; ++i) {
        works.push_back(rank.submit(flagged(buffers[i], flags, first + i)));
      }
      for (std::uint32_t i = 0; i < kOperations; ++i) {
        if (i == 20) let_it_wait();
        CHECK(!flags.is_done(first + i));
        CHECK_EQ(buffers[i][0], r);
        flags.write_ready(first + i);
        CHECK_UNTIL(flags.is_done(first + i));
        CHECK(buffers[i] == Ints(2000, 1));
      }
      for (const auto& work : works) ranks::expect_done(*work);
    });
  }
}

TEST(a_device_that_is_ahead_starts_all_that_is_queued) {
  World world(2);
  world.each([&](int r, Rank& rank) {
    Flags flags;
    flags.write_ready(10);
    std::deque<Ints> buffers;
    for (std::uint32_t value = 1; value <= 10; ++value) {
      rank.submit(flagged(buffers.emplace_back(50, r + 1), flags, value));
    }
    CHECK_UNTIL(flags.is_done(10));
    for (const Ints& buffer : buffers) CHECK(buffer == Ints(50, 3));
  });
}

TEST(a_device_that_does_not_come_is_named_on_all_ranks) {
  World world(3);
  const auto failures = world.failures([&](int r, Rank& rank) {
    rank.run(ranks::request(Op::barrier, DType::uint8));
    Stuck stuck;
    if (r == 1) {
      stuck.submit(rank, 0.2);
      CHECK_UNTIL(rank.communicator->failure().has_value());
      stuck.arrive_and_expect_released();
      CHECK(rank.communicator->failure().has_value());
      throw ranks::failure_of(*stuck.work).value();
    }
    rank.run(ranks::all_reduce(stuck.buffer));
  });
  const std::string cause =
      "all_reduce #2 int32[10000] sum: rank 1's device has not reached the operation in 0.2 s";
  for (int r = 0; r < 3; ++r) {
    const auto& failure = failures[static_cast<std::size_t>(r)];
    expect_failure(failure, FailureKind::timeout, {1}, cause);
    expect_failure(failure, FailureKind::timeout, {1}, "(last completed: barrier #1)");
    expect_failure(failure, FailureKind::timeout, {1},
                   "Hint: earlier work in that device's stream");
    CHECK_EQ(failure->is_repeat, r != 1);
  }
  CHECK(failures[1]->elapsed_s >= 0.2);
}

TEST(a_peer_that_closes_or_aborts_ends_the_wait_for_the_device) {
  for (const bool aborts : {true, false}) {
    World world(2);
    std::array<Stuck, 3> stuck;
    for (Stuck& one : stuck) one.submit(world[0]);
    let_it_wait();
    const double start = now_s();
    aborts ? world[1].abort("enough") : world[1].close();
    CHECK_UNTIL(world[0].communicator->failure().has_value());
    CHECK(now_s() - start < kAtOnceS);
    for (Stuck& one : stuck) one.arrive_and_expect_released();
    const auto kind = aborts ? FailureKind::aborted : FailureKind::peer_lost;
    for (Stuck& one : stuck) {
      expect_failure(ranks::failure_of(*one.work), kind, {1}, "all_reduce #1 int32[10000] sum:");
    }
  }
}

TEST(a_peer_that_dies_ends_the_wait_for_the_device) {
  World world(2);
  Stuck stuck;
  stuck.submit(world[0]);
  let_it_wait();
  const double start = now_s();
  // As the end of its process would; it says nothing.
  shutdown(world[1].communicator->peers().socket(0), SHUT_RDWR);
  CHECK_UNTIL(world[0].communicator->failure().has_value());
  CHECK(now_s() - start < kAtOnceS);
  stuck.arrive_and_expect_released();
  expect_failure(ranks::failure_of(*stuck.work), FailureKind::peer_lost, {1},
                 "all_reduce #1 int32[10000] sum: rank 1 ended unexpectedly");
}

TEST(a_peer_that_dies_in_the_operation_spoils_the_output) {
  World world(2);
  Stuck stuck;
  stuck.submit(world[0]);
  stuck.flags.write_ready(1);
  CHECK_UNTIL(world[0].header().step.value.load() == 1);  // it has arrived
  shutdown(world[1].communicator->peers().socket(0), SHUT_RDWR);
  stuck.expect_released();
  expect_failure(ranks::failure_of(*stuck.work), FailureKind::peer_lost, {1}, "rank 1 ended");
}

TEST(what_an_operation_throws_sets_the_flag) {
  World world(1);
  std::vector<std::uint8_t> buffer(8);
  Flags flags;
  Request request = ranks::in_place(Op::all_reduce, DType::boolean, ranks::piece(buffer));
  request.reduce_op = ReduceOp::avg;
  request.device_flags = DeviceFlags{&flags.ready, &flags.done, 1};
  flags.write_ready(1);
  const auto work = world[0].submit(request);
  expect_failure(ranks::failure_of(*work), FailureKind::aborted, "'avg' is not defined for bool");
  CHECK(flags.is_done(1));
  CHECK(buffer == std::vector<std::uint8_t>(8, 0xFF));
}

TEST(closing_releases_all_that_is_queued) {
  for (const bool aborts : {true, false}) {
    World world(2);
    std::array<Stuck, 4> stuck;
    for (Stuck& one : stuck) one.submit(world[0]);
    let_it_wait();
    const double start = now_s();
    if (aborts) {
      world[0].abort("enough");
      for (Stuck& one : stuck) one.arrive_and_expect_released();
    } else {
      world[0].close();  // which waits for the device, but not for long
      for (Stuck& one : stuck) one.expect_released();
      CHECK(now_s() - start < kArrivalS + kAtOnceS);
    }
    const auto kind = aborts ? FailureKind::aborted : FailureKind::closed;
    for (Stuck& one : stuck) expect_failure(ranks::failure_of(*one.work), kind, "");
    Stuck late;
    CHECK_THROWS(late.submit(world[0]), Failure, aborts ? "enough" : "closed");
    CHECK(!late.flags.is_done(1));  // it has never been an operation
    CHECK(late.buffer == Ints(10'000, 7));
  }
}

// The engine's thread cannot be waited for there.
TEST(closing_in_a_signal_handler_releases_what_is_queued) {
  World world(2);
  Stuck stuck;
  bool closed = false;
  const auto handler = [&] {
    if (std::exchange(closed, true)) return;
    std::thread([&] { stuck.submit(world[0]); }).join();
    world[0].engine->close();
    CHECK(stuck.flags.is_done(1) && stuck.work->completed());
  };
  CHECK_THROWS(world[0].engine->run(ranks::request(Op::barrier, DType::uint8), handler), Failure,
               "closed");
  stuck.expect_released();
}

// While a peer is in this rank's memory, the device does not go on.
TEST(the_flag_waits_for_peers_in_the_memory) {
  World world(2);
  Stuck stuck;
  std::thread closer;
  {
    const PeerMemoryAccess access(world[1].communicator->peers());
    stuck.submit(world[0]);
    closer = std::thread([&] { world[0].close(); });
    CHECK_UNTIL(world[0].communicator->closed());
    let_it_wait();
    CHECK(!stuck.flags.is_done(1));
    CHECK_EQ(stuck.buffer[0], 7);
  }
  closer.join();
  stuck.expect_released();
}

TEST(the_flag_is_set_before_the_work_is_done) {
  World world(1);
  for (const bool fails : {false, true}) {
    Ints buffer(10);
    Flags flags;
    const auto work = world[0].submit(flagged(buffer, flags));
    std::atomic<int> order{0};
    work->then([&](const Failure* failure) {
      order = flags.is_done(1) && (failure != nullptr) == fails ? 1 : 2;
    });
    if (fails) world[0].abort("enough");
    flags.write_ready(1);
    CHECK_UNTIL(order.load() != 0);
    CHECK_EQ(order.load(), 1);
  }
}

TEST(the_flight_recorder_shows_an_operation_that_waits_for_its_device_as_queued) {
  World world(1);
  Stuck stuck;
  stuck.submit(world[0]);
  let_it_wait();
  FlightRings& rings = world[0].communicator->peers().own().flight().rings;
  const EventRing ring(rings.next[0], rings.operations, FlightRings::kOperations);
  TraceEvent event;
  CHECK(ring.read(0, event) && event.issued_ns != 0 && event.started_ns == 0);
  stuck.flags.write_ready(1);
  ranks::expect_done(*stuck.work);
  CHECK(ring.read(0, event) && event.started_ns - event.issued_ns > 10'000'000);
}

TEST(a_forked_child_sets_no_flag) {
  void* const shared =
      mmap(nullptr, sizeof(Flags), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  auto& flags = *new (shared) Flags;
  {
    World world(1);
    Ints buffer(10);
    const auto work = world[0].submit(flagged(buffer, flags));
    let_it_wait();
    const pid_t child = fork();
    if (child == 0) {
      world[0].engine->close();
      world[0].abort("by the child");
      _exit(flags.is_done(1) ? 1 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(!flags.is_done(1));
    flags.write_ready(1);
    ranks::expect_done(*work);
  }
  munmap(shared, sizeof(Flags));
}

TEST(flags_are_refused_where_no_thread_would_heed_them) {
  World world(2);
  Ints buffer(10);
  Flags flags;
  const Request good = flagged(buffer, flags);
  CHECK_THROWS(world[0].run(good), std::invalid_argument, "all_reduce: only an asynchronous");
  Request bad = good;
  bad.device_flags->ready = nullptr;
  CHECK_THROWS(world[0].submit(bad), std::invalid_argument, "aligned 32-bit word");
  bad = good;
  bad.device_flags->done =
      reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::uintptr_t>(&flags.done) + 1);
  CHECK_THROWS(world[0].submit(bad), std::invalid_argument, "aligned 32-bit word");
  bad = good;
  bad.part = Part{};
  CHECK_THROWS(world[0].submit(bad), std::invalid_argument, "a group on one node");
  Request message = ranks::send(DType::int32, ranks::piece(buffer), 1);
  message.device_flags = good.device_flags;
  CHECK_THROWS(world[0].post(message), std::invalid_argument, "send: only an asynchronous");
  CHECK_EQ(flags.done, 0);
  CHECK(!world[0].communicator->failure());
}
