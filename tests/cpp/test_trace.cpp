// What is recorded of operations, and that neither writers nor readers wait for each other.
#include <atomic>
#include <thread>

#include "check.hpp"
#include "clock.hpp"
#include "ranks.hpp"
#include "trace.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
std::vector<TraceEvent> events_of(Rank& rank) {
  std::uint64_t dropped = 0;
  return rank.communicator->trace().events(dropped);
}
}  // namespace

TEST(the_last_events_are_kept_and_the_others_counted) {
  Trace trace;
  trace.start();
  for (std::uint64_t i = 0; i < Trace::kEvents + 10; ++i) trace.add(ranks::numbered(i));
  std::uint64_t dropped = 0;
  const auto events = trace.events(dropped);
  CHECK_EQ(dropped, 10U);
  CHECK_EQ(events.size(), Trace::kEvents);
  CHECK_EQ(events.front().seq, 10U);
  CHECK_EQ(events.back().seq, Trace::kEvents + 9);
  trace.start();
  CHECK_EQ(trace.events(dropped).size(), 0U);
  CHECK_EQ(dropped, 0U);
}

TEST(a_reader_sees_whole_events_while_others_write) {
  Trace trace;
  trace.start();
  std::atomic<bool> done{false};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      for (std::uint64_t i = 1; i <= 2 * Trace::kEvents; ++i) trace.add(ranks::numbered(i));
    });
  }
  std::thread reader([&] {
    while (!done.load()) {
      std::uint64_t dropped = 0;
      for (const TraceEvent& event : trace.events(dropped)) CHECK(ranks::whole(event));
    }
  });
  for (std::thread& writer : writers) writer.join();
  done.store(true);
  reader.join();
}

TEST(nothing_is_recorded_while_it_is_off) {
  World world(2);
  world.each([](int, Rank& rank) {
    Ints buffer(10, 1);
    rank.run(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer)));
    CHECK_EQ(events_of(rank).size(), 0U);
  });
}

TEST(all_ranks_know_who_came_last) {
  World world(3);
  std::atomic<std::int64_t> others_wait_since{0};
  world.each([&](int r, Rank& rank) {
    rank.communicator->trace().start();
    Ints buffer(1000, 1);
    rank.run(ranks::request(Op::barrier, DType::uint8));
    if (r == 1) {
      const Peers& peers = rank.communicator->peers();
      const std::uint32_t next = peers.own().header().step.value.load() + 1;
      for (int other : {0, 2}) {
        CHECK_UNTIL(peers.segment(other).header().step.reached(next));
      }
      others_wait_since.store(now_ns());
    }
    ranks::expect_done(
        *rank.submit(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer))));
    const auto events = events_of(rank);
    CHECK_EQ(events.size(), 2U);
    CHECK_EQ(events[1].last_rank, 1);
    CHECK_EQ(events[1].nbytes, 4000U);
    CHECK_EQ(events[1].seq, 2U);
    CHECK(others_wait_since.load() > 0 && events[1].arrived_ns >= others_wait_since.load());
    CHECK(events[1].issued_ns < others_wait_since.load() || r == 1);
    CHECK(events[1].flags & TraceEvent::kAsync);
  });
}

// A rank that is not traced says nothing of when it came.
TEST(the_last_is_not_known_unless_all_record) {
  World world(2);
  world.each([](int r, Rank& rank) {
    if (r == 0) rank.communicator->trace().start();
    if (r == 1) rank.communicator->flight().set_on(false);
    rank.run(ranks::request(Op::barrier, DType::uint8));
    if (r == 0) {
      CHECK_EQ(events_of(rank)[0].last_rank, -1);
      CHECK_EQ(events_of(rank)[0].arrived_ns, 0);
    }
  });
}

TEST(whoever_is_missing_is_blamed) {
  World world(2);
  world[0].communicator->trace().start();
  Request request = ranks::request(Op::barrier, DType::uint8);
  request.timeout_s = 0.2;
  try {
    world[0].run(request);
    CHECK(false);
  } catch (const Failure&) {
  }
  const auto events = events_of(world[0]);
  CHECK_EQ(events.size(), 1U);
  CHECK(events[0].flags & TraceEvent::kFailed);
  CHECK_EQ(events[0].last_rank, 1);
}
