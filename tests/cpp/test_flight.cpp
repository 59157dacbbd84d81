// The flight recorder: what a rank's segment shows of its operations, to its peers and to whoever
// reads the file; and that neither can be led astray by what is in it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "check.hpp"
#include "flight_reader.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
struct Rings {
  std::vector<TraceEvent> operations, messages, steps;
};

// What a reader finds in its copy.
Rings rings_of(const std::vector<std::byte>& copy) {
  const std::byte* at = copy.data() + sizeof(FlightHead) + FlightArea::kRankInfoBytes +
                        sizeof(FlightForming) + sizeof(FlightCounters) + 24;
  const auto take = [&at](std::size_t slots) {
    std::vector<TraceEvent> found;
    for (std::size_t i = 0; i < slots; ++i, at += sizeof(EventSlot)) {
      std::uint64_t stamp = 0;
      std::memcpy(&stamp, at, sizeof stamp);
      if (stamp == 0) continue;
      std::memcpy(&found.emplace_back(), at + sizeof stamp, sizeof(TraceEvent));
    }
    return found;
  };
  Rings rings;
  rings.operations = take(FlightRings::kOperations);
  rings.messages = take(FlightRings::kMessages);
  rings.steps = take(FlightRings::kSteps);
  return rings;
}
Rings shown_by(Rank& rank) {
  return rings_of(copy_flight(rank.communicator->peers().own()));
}
Request barrier() {
  return ranks::request(Op::barrier, DType::uint8);
}

struct Counts {
  std::uint64_t operations, nbytes, busy_ns, waiting_ns, last_arrivals, awaited_ns, messages,
      message_nbytes;
};
Counts counted_by(Rank& rank) {
  const auto copy = copy_counters(rank.communicator->peers().own());
  Counts counts{};
  CHECK_EQ(copy.size(), sizeof counts);
  std::memcpy(&counts, copy.data(), sizeof counts);
  return counts;
}

// Rank 1 comes to an operation for which rank 0 has waited for 2 ms at least.
constexpr std::uint64_t kLateNs = 2'000'000;
void come_late(World& world, const Request& request) {
  const std::uint32_t arrived = world[1].header().step.value.load() + 1;
  const auto work = world[0].submit(request);
  CHECK_UNTIL(world[0].header().step.reached(arrived));
  usleep(kLateNs / 1000);
  world[1].run(request);
  ranks::expect_done(*work);
}
}  // namespace

TEST(an_operation_is_there_while_it_runs_and_when_it_is_done) {
  World world(2);
  Ints buffer(10, 1);
  const auto work =
      world[0].submit(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer)));
  const auto queued = world[0].submit(barrier());
  CHECK_UNTIL(shown_by(world[0]).operations.at(0).started_ns > 0);
  const auto running = shown_by(world[0]).operations;
  CHECK_EQ(running.size(), 2U);
  CHECK_EQ(running[0].seq, 1U);
  CHECK_EQ(running[0].count, 10U);
  CHECK(running[0].started_ns >= running[0].issued_ns && running[0].issued_ns > 0);
  CHECK_EQ(running[0].finished_ns, 0);
  CHECK_EQ(running[1].seq, 2U);  // it waits for the first
  CHECK_EQ(running[1].started_ns, 0);
  CHECK(shown_by(world[1]).operations.empty());

  Ints other(10, 1);
  world[1].run(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(other)));
  world[1].run(barrier());
  ranks::expect_done(*work);
  ranks::expect_done(*queued);
  CHECK_UNTIL(shown_by(world[0]).operations.at(1).finished_ns > 0);
  const auto done = shown_by(world[0]).operations;
  CHECK_EQ(done.size(), 2U);  // each has kept its slot
  CHECK(done[0].finished_ns >= done[0].started_ns && done[0].thread != 0);
  CHECK(done[0].flags == TraceEvent::kAsync);
  CHECK_EQ(shown_by(world[1]).operations.size(), 2U);
}

TEST(a_failure_is_marked) {
  World world(2);
  Request request = barrier();
  request.timeout_s = 0.2;
  CHECK_THROWS(world[0].run(request), Failure, "rank 1 did not arrive");
  const auto events = shown_by(world[0]).operations;
  CHECK_EQ(events.size(), 1U);
  CHECK(events[0].flags & TraceEvent::kFailed);
  CHECK_EQ(events[0].blamed, 1);
  CHECK(events[0].finished_ns > 0);
}

TEST(what_was_queued_when_the_group_failed_is_not_shown_as_queued) {
  World world(2);
  const auto first = world[0].submit(barrier());
  const auto second = world[0].submit(barrier());
  world[1].abort("enough");
  CHECK(ranks::failure_of(*first) && ranks::failure_of(*second));
  CHECK_UNTIL(shown_by(world[0]).operations.at(1).finished_ns > 0);
  CHECK(shown_by(world[0]).operations.at(1).flags & TraceEvent::kFailed);
}

TEST(a_receive_is_there_before_its_message) {
  World world(2);
  Ints there(5, 0), here(5, 7);
  const auto work = world[0].post(ranks::recv(DType::int32, ranks::piece(there), 1, 9));
  const auto pending = shown_by(world[0]).messages;
  CHECK_EQ(pending.size(), 1U);
  CHECK_EQ(pending[0].peer, 1);
  CHECK_EQ(pending[0].tag, 9U);
  CHECK_EQ(pending[0].started_ns, 0);
  CHECK_EQ(pending[0].finished_ns, 0);
  ranks::expect_done(*world[1].post(ranks::send(DType::int32, ranks::piece(here), 0, 9)));
  ranks::expect_done(*work);
  const auto done = shown_by(world[0]).messages;
  CHECK_EQ(done.size(), 1U);
  CHECK(done[0].started_ns > 0 && done[0].finished_ns >= done[0].started_ns);
}

TEST(operations_and_messages_are_counted_when_they_complete) {
  World world(2);
  world.each([](int r, Rank& rank) {
    Ints buffer(10, 1);
    for (int i = 0; i < 600; ++i) rank.run(ranks::all_reduce(buffer));  // more than a ring holds
    Ints message(5, 7);
    ranks::expect_done(*rank.post(r == 0 ? ranks::send(DType::int32, ranks::piece(message), 1)
                                         : ranks::recv(DType::int32, ranks::piece(message), 0)));
  });
  for (int r = 0; r < 2; ++r) {
    const Counts counts = counted_by(world[r]);
    CHECK_EQ(counts.operations, 600U);
    CHECK_EQ(counts.nbytes, 600U * 40);
    CHECK_EQ(counts.messages, 1U);
    CHECK_EQ(counts.message_nbytes, 20U);
    CHECK(counts.busy_ns >= counts.waiting_ns && counts.busy_ns > 0);
  }
  const std::uint64_t last =
      counted_by(world[0]).last_arrivals + counted_by(world[1]).last_arrivals;
  CHECK(last > 0 && last <= 600);
}

TEST(the_rank_that_comes_last_is_counted_and_for_how_long_the_others_wait) {
  World world(2);
  come_late(world, barrier());
  const Counts waits = counted_by(world[0]), late = counted_by(world[1]);
  CHECK(waits.waiting_ns >= kLateNs && waits.busy_ns >= waits.waiting_ns);
  CHECK_EQ(waits.last_arrivals, 0U);
  CHECK_EQ(waits.awaited_ns, 0U);
  CHECK_EQ(late.last_arrivals, 1U);
  CHECK_EQ(late.awaited_ns, waits.waiting_ns);
  CHECK_EQ(late.waiting_ns, 0U);
}

TEST(of_an_operation_of_several_steps_only_the_first_is_waited_for) {
  World world(2);
  Request step = barrier();
  step.part = Part{.operation = {.op = Op::all_reduce, .seq = 7}};
  come_late(world, step);
  const std::uint64_t first_ns = counted_by(world[1]).awaited_ns;
  CHECK(first_ns >= kLateNs);
  come_late(world, step);
  CHECK_EQ(counted_by(world[1]).awaited_ns, first_ns);
  CHECK_EQ(counted_by(world[1]).last_arrivals, 1U);
  CHECK_EQ(counted_by(world[1]).operations, 0U);
}

TEST(failed_operations_are_not_counted) {
  World world(2);
  Request request = barrier();
  request.timeout_s = 0.2;
  CHECK_THROWS(world[0].run(request), Failure, "rank 1 did not arrive");
  CHECK_EQ(counted_by(world[0]).operations, 0U);
}

TEST(a_peer_may_announce_any_time_of_arrival) {
  for (const std::int64_t claimed :
       {std::int64_t{-1}, std::int64_t{1}, std::numeric_limits<std::int64_t>::max()}) {
    TraceEvent event = ranks::numbered(3);
    event.op = Op::barrier;
    event.flags = 0;
    event.started_ns = 1000;
    event.finished_ns = 3000;
    event.arrived_ns = std::max(event.started_ns, claimed);
    World world(1);
    world[0].communicator->flight().count(event, std::min(event.started_ns, claimed));
    const Counts counts = counted_by(world[0]);
    CHECK(counts.waiting_ns <= 2000 && counts.awaited_ns < 1000);
  }
}

TEST(steps_do_not_displace_the_operation_that_they_are_of) {
  World world(1);
  Flight& flight = world[0].communicator->flight();
  EventRing::Ticket ticket = 0;
  flight.write(ranks::numbered(7), ticket);
  for (int i = 0; i < 2000; ++i) {
    Request request = barrier();
    request.part = Part{.operation = {.op = Op::all_reduce, .seq = 7}};
    world[0].run(std::move(request));
  }
  const Rings rings = shown_by(world[0]);
  CHECK_EQ(rings.operations.size(), 1U);
  CHECK_EQ(rings.steps.size(), FlightRings::kSteps);
  CHECK(rings.steps[0].flags & TraceEvent::kStep);
}

TEST(an_event_whose_slot_was_taken_gets_another) {
  World world(1);
  Flight& flight = world[0].communicator->flight();
  EventRing::Ticket old = 0;
  flight.write(ranks::numbered(1), old);
  for (std::uint64_t i = 0; i < FlightRings::kOperations; ++i) {
    EventRing::Ticket ticket = 0;
    flight.write(ranks::numbered(100 + i), ticket);
  }
  flight.write(ranks::numbered(2), old);
  int found = 0;
  for (const TraceEvent& event : shown_by(world[0]).operations) {
    CHECK(event.seq != 1);
    found += event.seq == 2;
  }
  CHECK_EQ(found, 1);
}

TEST(readers_see_whole_events_while_others_write) {
  ranks::Links links(1, ranks::kStagingBytes);
  const FileDescriptor file(fcntl(links.segment_fd(0), F_DUPFD_CLOEXEC, 0));
  Communicator communicator(links.take(0), ranks::kStagingBytes);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::uint64_t i = 1; !done.load(); i += 2) {
      EventRing::Ticket ticket = 0;
      communicator.flight().write(ranks::numbered(i), ticket);
      communicator.flight().write(ranks::numbered(i + 1), ticket);
    }
  });
  for (int i = 0; i < 200; ++i) {
    for (const auto& copy : {copy_flight(communicator.peers().own()), read_flight(file.get())}) {
      for (const TraceEvent& event : rings_of(copy).operations) CHECK(ranks::whole(event));
    }
  }
  done.store(true);
  writer.join();
}

TEST(readers_wait_for_an_event_that_is_being_written) {
  World world(1);
  world[0].run(barrier());
  FlightRings& rings = world[0].communicator->peers().own().flight().rings;
  const std::uint64_t stamp = rings.operations[0].stamp.exchange(0);
  std::thread writer([&] {
    usleep(1000);
    rings.operations[0].stamp.store(stamp);
  });
  CHECK_EQ(shown_by(world[0]).operations.size(), 1U);
  writer.join();
  rings.operations[0].stamp.store(0);  // by a thread that was killed there
  CHECK(shown_by(world[0]).operations.empty());
}

TEST(a_thread_has_the_id_that_the_kernel_gave_it) {
  World world(1);
  world[0].run(barrier());
  CHECK_EQ(shown_by(world[0]).operations.at(0).thread, this_thread());
  std::thread([&] {
    world[0].run(barrier());
    CHECK_EQ(shown_by(world[0]).operations.at(1).thread, this_thread());
  }).join();
}

TEST(a_meeting_is_read_whole_or_not_at_all) {
  World world(2);
  Flight& flight = world[0].communicator->flight();
  const auto shown = [&world] {
    const auto copy = copy_flight(world[1].communicator->peers().segment(0));
    FlightForming found{};
    std::memcpy(static_cast<void*>(&found),
                copy.data() + sizeof(FlightHead) + FlightArea::kRankInfoBytes, sizeof found);
    const std::string text(reinterpret_cast<const char*>(&found.text), FlightForming::kTextBytes);
    return std::pair(found.since_ns.load(), text);
  };
  CHECK_EQ(shown().first, 0U);
  flight.show_forming(std::string(1000, 'x'), 7);  // as much as there is place for
  CHECK(shown() == std::pair(std::uint64_t{7}, std::string(FlightForming::kTextBytes, 'x')));
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::uint64_t i = 1; !done; ++i) {
      flight.show_forming(std::string(FlightForming::kTextBytes, static_cast<char>('a' + i % 26)),
                          i);
    }
  });
  for (int i = 0; i < 500; ++i) {
    const auto [since, text] = shown();
    if (since != 0 && since != 7) {
      CHECK(text == std::string(text.size(), static_cast<char>('a' + since % 26)));
    }
  }
  done = true;
  writer.join();
  flight.show_forming("", 0);
  CHECK_EQ(shown().first, 0U);
}

// ---- what others may have written

TEST(garbage_in_a_peers_segment_is_copied_and_no_more) {
  World world(2);
  const Segment& theirs = world[1].communicator->peers().own();
  const auto fill = [](void* memory, int byte, std::size_t n) { std::memset(memory, byte, n); };
  for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
    fill(&theirs.flight(), byte, sizeof(FlightArea));
    fill(&theirs.header().failure, byte, sizeof theirs.header().failure);
    fill(&theirs.header().state, byte, sizeof theirs.header().state);
    const auto copy = copy_flight(world[0].communicator->peers().segment(1));
    CHECK_EQ(copy.size(), sizeof(FlightHead) + sizeof(FlightArea));
  }
}

// A peer may change a rank's own rings, too: where the next event goes is not believed.
TEST(a_rank_writes_within_its_rings_whatever_the_counters_say) {
  World world(1);
  FlightRings& rings = world[0].communicator->peers().own().flight().rings;
  for (std::uint64_t next : {~std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{511}}) {
    rings.next[0].store(next);
    for (int i = 0; i < 3; ++i) world[0].run(barrier());
  }
}

TEST(files_that_are_no_segments) {
  for (std::size_t nbytes :
       {std::size_t{0}, std::size_t{8}, sizeof(Header), std::size_t{1} << 20}) {
    const FileDescriptor file = ranks::file_of(nbytes);
    CHECK_THROWS(read_flight(file.get()), Failure, "");
  }
  const FileDescriptor directory(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  CHECK_THROWS(read_flight(directory.get()), Failure, "cut short");
  CHECK_THROWS(read_flight(-1), Failure, "cut short");
}

TEST(a_file_that_says_that_its_record_is_elsewhere_or_is_cut) {
  const std::uint64_t kMost = ~std::uint64_t{0};
  for (std::uint64_t at : {kMost, kMost >> 1, kMost - 4096, std::uint64_t{1} << 40}) {
    ranks::Links links(1, ranks::kStagingBytes);
    const int fd = links.segment_fd(0);
    CHECK_EQ(pwrite(fd, &at, sizeof at, offsetof(Header, flight_at)), ssize_t{sizeof at});
    CHECK_THROWS(read_flight(fd), Failure, "a segment");
  }
  ranks::Links links(1, ranks::kStagingBytes);
  const Layout layout(1, ranks::kStagingBytes);
  CHECK_EQ(ftruncate(links.segment_fd(0), static_cast<off_t>(layout.flight() + 5000)), 0);
  CHECK_THROWS(read_flight(links.segment_fd(0)), Failure, "cut short");
}
