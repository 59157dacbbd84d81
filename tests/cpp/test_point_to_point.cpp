// send and recv: bytes, order, tags, any source, receives that are taken back.
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
// Around a frame, the ring, and several times around it.
const std::size_t kCounts[] = {0, 1, 3, 4, 1000, kRingBytes / 4 - 4, kRingBytes / 4, 200'003};

Ints numbers(std::size_t count, int start) {
  Ints all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = start + static_cast<int>(i);
  return all;
}

std::shared_ptr<Work> post_send(Rank& rank, Ints& buffer, int to, std::uint32_t tag = 0) {
  return rank.post(ranks::send(DType::int32, ranks::piece(buffer), to, tag));
}
std::shared_ptr<Work> post_recv(Rank& rank, Ints& buffer, int from, std::uint32_t tag = 0) {
  return rank.post(ranks::recv(DType::int32, ranks::piece(buffer), from, tag));
}
void send(Rank& rank, Ints buffer, int to, std::uint32_t tag = 0) {
  ranks::expect_done(*post_send(rank, buffer, to, tag));
}
Ints recv(Rank& rank, std::size_t count, int from, std::uint32_t tag = 0) {
  Ints buffer(count, -1);
  ranks::expect_done(*post_recv(rank, buffer, from, tag));
  return buffer;
}
}  // namespace

TEST(messages_of_all_sizes_arrive_in_order) {
  World world(2);
  world.each([](int r, Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      for (std::size_t count : kCounts) {
        if (r == 0) {
          send(rank, numbers(count, round), 1);
        } else {
          CHECK(recv(rank, count, 0) == numbers(count, round));
        }
      }
    }
  });
}

TEST(both_directions_at_once) {
  World world(2);
  world.each([](int r, Rank& rank) {
    for (std::size_t count : kCounts) {
      Ints mine = numbers(count, r), theirs(count);
      const auto sent = post_send(rank, mine, 1 - r);
      const auto got = post_recv(rank, theirs, 1 - r);
      ranks::expect_done(*sent);
      ranks::expect_done(*got);
      CHECK(theirs == numbers(count, 1 - r));
      CHECK_EQ(got->source_rank(), 1 - r);
    }
  });
}

TEST(a_ring_of_four_ranks) {
  World world(4);
  world.each([](int r, Rank& rank) {
    Ints token = numbers(70'000, r);
    for (int hop = 0; hop < 4; ++hop) {
      Ints next(token.size());
      const auto got = post_recv(rank, next, (r + 3) % 4);
      send(rank, token, (r + 1) % 4);
      ranks::expect_done(*got);
      token = next;
    }
    CHECK(token == numbers(70'000, r));
  });
}

TEST(tags_may_be_received_in_any_order) {
  World world(2);
  world.each([](int r, Rank& rank) {
    constexpr std::uint32_t kTags = 12;
    const auto length = [](std::uint32_t tag) { return std::size_t{tag * tag * 400}; };
    if (r == 0) {
      for (std::uint32_t tag = 0; tag < kTags; ++tag) {
        send(rank, numbers(length(tag), static_cast<int>(tag)), 1, tag);
      }
      return;
    }
    for (std::uint32_t tag = kTags; tag-- > 0;) {
      CHECK(recv(rank, length(tag), 0, tag) == numbers(length(tag), static_cast<int>(tag)));
    }
  });
}

// They are set aside while they still stream in, several times around the ring.
TEST(large_messages_that_nobody_waits_for_yet) {
  constexpr std::size_t kLarge = 500'001;
  World world(2);
  world.each([](int r, Rank& rank) {
    for (int round = 0; round < 5; ++round) {
      if (r == 0) {
        send(rank, numbers(kLarge, round), 1, 1);
        send(rank, {round}, 1, 2);
      } else {
        CHECK(recv(rank, 1, 0, 2) == Ints{round});
        CHECK(recv(rank, kLarge, 0, 1) == numbers(kLarge, round));
      }
    }
  });
}

// Random orders on both sides, blocking on nothing: whatever is set aside, matched half-way or
// late.
TEST(messages_of_one_tag_never_overtake_each_other) {
  constexpr int kMessages = 120;
  constexpr std::uint32_t kTags = 4;
  World world(2);
  world.each([](int r, Rank& rank) {
    std::vector<Ints> buffers(kMessages);
    std::vector<std::shared_ptr<Work>> works;
    std::vector<std::vector<int>> of_tag(kTags);  // the messages of each tag, in order
    std::mt19937 same_on_both(3);
    std::vector<std::size_t> lengths;
    for (int m = 0; m < kMessages; ++m) {
      of_tag[same_on_both() % kTags].push_back(m);
      lengths.push_back(same_on_both() % 5 == 0 ? same_on_both() % 100'000 : same_on_both() % 50);
    }
    if (r == 0) {
      std::vector<std::uint32_t> tags(kMessages);
      for (std::uint32_t tag = 0; tag < kTags; ++tag) {
        for (int m : of_tag[tag]) tags[static_cast<std::size_t>(m)] = tag;
      }
      for (std::size_t m = 0; m < kMessages; ++m) {
        buffers[m] = numbers(lengths[m], static_cast<int>(m));
        works.push_back(post_send(rank, buffers[m], 1, tags[m]));
      }
    } else {
      std::mt19937 random(5);
      std::vector<std::size_t> taken(kTags);
      for (int posted = 0; posted < kMessages;) {
        const std::uint32_t tag = random() % kTags;
        if (taken[tag] == of_tag[tag].size()) continue;
        const auto m = static_cast<std::size_t>(of_tag[tag][taken[tag]++]);
        buffers[m].assign(lengths[m], -1);
        works.push_back(post_recv(rank, buffers[m], random() % 2 == 0 ? 0 : -1, tag));
        ++posted;
        if (random() % 8 == 0) ranks::expect_done(*works.back());
      }
    }
    for (const auto& work : works) ranks::expect_done(*work);
    for (std::size_t m = 0; m < kMessages; ++m) {
      CHECK(buffers[m] == numbers(lengths[m], static_cast<int>(m)));
    }
  });
}

TEST(any_source_tells_who_sent) {
  World world(4);
  world.each([](int r, Rank& rank) {
    constexpr int kEach = 10;
    if (r > 0) {
      for (int i = 0; i < kEach; ++i) send(rank, {r, i}, 0, 7);
      recv(rank, 1, 0, 8);  // leaves only when all has arrived
      return;
    }
    std::vector<int> next(4);
    for (int i = 0; i < 3 * kEach; ++i) {
      Ints buffer(2);
      const auto work = post_recv(rank, buffer, -1, 7);
      ranks::expect_done(*work);
      CHECK_EQ(buffer[0], work->source_rank());
      CHECK_EQ(buffer[1], next[static_cast<std::size_t>(buffer[0])]++);
    }
    for (int to = 1; to < 4; ++to) send(rank, {0}, to, 8);
  });
}

TEST(messages_pass_while_a_collective_waits) {
  World world(2);
  world.each([](int r, Rank& rank) {
    if (r == 0) {
      const auto barrier = rank.submit(ranks::request(Op::barrier, DType::uint8));
      send(rank, {1, 2, 3}, 1);
      CHECK(recv(rank, 1, 1) == Ints{4});
      ranks::expect_done(*barrier);
    } else {
      CHECK(recv(rank, 3, 0) == (Ints{1, 2, 3}));
      send(rank, {4}, 0);
      rank.run(ranks::request(Op::barrier, DType::uint8));
    }
  });
}

TEST(a_send_does_not_wait_for_its_receiver_as_long_as_there_is_room) {
  World world(2);
  for (int i = 0; i < 20; ++i) send(world[0], numbers(1000, i), 1);
  for (int i = 0; i < 20; ++i) CHECK(recv(world[1], 1000, 0) == numbers(1000, i));
}

TEST(what_was_sent_before_closing_still_arrives) {
  for (int round = 0; round < 50; ++round) {
    World world(2);
    world.each([&](int r, Rank& rank) {
      if (r == 0) {
        send(rank, numbers(10, round), 1);
        rank.close();
      } else {
        CHECK(recv(rank, 10, 0) == numbers(10, round));
      }
    });
  }
}

TEST(any_source_is_served_as_long_as_somebody_is_left) {
  World world(3);
  world[2].close();
  Ints first(1), second(1);
  const auto served = post_recv(world[0], first, -1);
  CHECK(!served->wait(0.3));  // rank 1 may still send
  send(world[1], {5}, 0);
  ranks::expect_done(*served);
  CHECK_EQ(first[0], 5);
  const auto left_alone = post_recv(world[0], second, -1);
  world[1].close();
  const auto failure = ranks::failure_of(*left_alone);
  CHECK(failure && failure->kind == FailureKind::peer_lost);
}

TEST(threads_of_a_rank_send_and_receive_side_by_side) {
  constexpr int kThreads = 3;
  constexpr int kMessages = 40;
  World world(2);
  world.each([](int r, Rank& rank) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (std::uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int m = 0; m < kMessages; ++m) {
          const std::size_t count = static_cast<std::size_t>(m * 37 % 900);
          if (r == 0) {
            send(rank, numbers(count, m), 1, t);
          } else if (recv(rank, count, 0, t) != numbers(count, m)) {
            ++wrong;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
  });
}

TEST(a_receive_is_taken_back_unless_its_message_has_come) {
  World world(2);
  Ints first(1), second(1);
  const auto taken = post_recv(world[0], first, -1);
  CHECK(world[0].point_to_point->take_back(*taken).has_value());
  CHECK(!world[0].point_to_point->take_back(*taken));  // it is there no more
  const auto stays = post_recv(world[0], second, -1);
  send(world[1], {7}, 0);
  ranks::expect_done(*stays);
  CHECK(!world[0].point_to_point->take_back(*stays));
  CHECK(second == Ints{7});
  CHECK(first == Ints{0});
  CHECK(!taken->completed());  // whoever has taken it finishes it
  taken->finish(std::nullopt, 5);
  ranks::expect_done(*taken);
  CHECK_EQ(taken->source_rank(), 5);
}

TEST(peers_wake_a_rank_only_while_a_message_is_pending) {
  World world(2);
  const auto& muted = world[0].header().bell.muted;
  CHECK_EQ(muted.load(), 1U);
  Ints first(1), second(1);
  const auto taken = post_recv(world[0], first, 1);
  CHECK_EQ(muted.load(), 0U);
  CHECK(world[0].point_to_point->take_back(*taken).has_value());
  CHECK_EQ(muted.load(), 1U);
  const auto received = post_recv(world[0], second, 1);
  CHECK_EQ(muted.load(), 0U);
  send(world[1], {7}, 0);
  ranks::expect_done(*received);
  CHECK(!world[0].point_to_point->take_back(*received));  // waits for the step that completed it
  CHECK_EQ(muted.load(), 1U);
}

TEST(a_receive_whose_message_has_begun_is_not_taken_back) {
  World world(2);
  Ints large = numbers(kRingBytes, 3), got(kRingBytes);
  const auto sent = post_send(world[0], large, 1);  // a part of it is in the ring
  const auto receive = post_recv(world[1], got, -1);
  CHECK(!world[1].point_to_point->take_back(*receive));
  ranks::expect_done(*receive);
  ranks::expect_done(*sent);
  CHECK(got == large);
}

// Each message is received once: by the core, or by who took its receive back and posts it anew.
TEST(receives_are_taken_back_while_messages_come) {
  constexpr int kMessages = 400;
  World world(3);
  world.each([](int r, Rank& rank) {
    if (r > 0) {
      for (int m = 0; m < kMessages; ++m) send(rank, numbers(m % 7 == 0 ? 9000 : 2, m), 0, 1);
      return;
    }
    for (int m = 0; m < 2 * kMessages;) {
      const int number = m % kMessages;
      Ints buffer(number % 7 == 0 ? 9000 : 2, -1);
      const auto work = post_recv(rank, buffer, 1 + m / kMessages, 1);
      std::thread thief([&] {
        if (rank.point_to_point->take_back(*work)) work->finish(std::nullopt, -7);
      });
      ranks::expect_done(*work);
      thief.join();
      if (work->source_rank() == -7) {
        CHECK(buffer == Ints(buffer.size(), -1));
        continue;
      }
      CHECK(buffer == numbers(buffer.size(), number));
      ++m;
    }
  });
}
