// send and recv: bytes, order, tags, any source, and how they end when something fails.
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

TEST(another_size_or_type_is_a_mismatch_that_tells_both) {
  for (bool late : {false, true}) {  // matched on arrival, or found among what was set aside
    for (std::uint32_t count : {4u, 5u}) {
      World world(2);
      Ints mine(5), got(count);
      ranks::expect_done(*post_send(world[0], mine, 1, 2));
      Ints other(1);
      if (late) {
        post_recv(world[1], other, 0, 9);
        ranks::expect_done(*post_send(world[0], other, 1, 9));
      }
      Request request = ranks::recv(DType::int32, ranks::piece(got), 0, 2);
      if (count == 5) request.dtype = DType::float32;
      std::optional<Failure> failure;
      try {
        failure = ranks::failure_of(*world[1].post(request));
      } catch (const Failure& thrown) {
        failure = thrown;
      }
      CHECK(failure && failure->kind == FailureKind::mismatch);
      CHECK(failure->ranks == std::vector<int>{0});
      const std::string text = failure->what();
      CHECK(text.find(std::string(name(request.dtype)) + "[" + std::to_string(count) + "]") !=
            std::string::npos);
      CHECK(text.find("rank 0 sends int32[5]") != std::string::npos);
    }
  }
}

TEST(nobody_answers_in_time) {
  World world(3);
  Ints buffer(5);
  Request one = ranks::recv(DType::int32, ranks::piece(buffer), 1, 3);
  one.timeout_s = 0.1;
  const auto failure = ranks::failure_of(*world[0].post(one));
  CHECK(failure && failure->kind == FailureKind::timeout);
  CHECK(failure->ranks == std::vector<int>{1});
  CHECK(std::strstr(failure->what(),
                    "recv #1 int32[5] from rank 1 tag 3: rank 1 did not answer in "
                    "0.1 s. Hint: ") != nullptr);
  CHECK_THROWS(world[0].post(one), Failure, "recv #1");
}

TEST(none_of_several_answers_in_time) {
  World world(3);
  Ints buffer(5);
  Request any = ranks::recv(DType::int32, ranks::piece(buffer), -1);
  any.timeout_s = 0.1;
  const auto failure = ranks::failure_of(*world[2].post(any));
  CHECK(failure && (failure->ranks == std::vector<int>{0, 1}));
  CHECK(std::strstr(failure->what(), "from any rank tag 0: none of ranks 0, 1 answered in 0.1 s") !=
        nullptr);
}

TEST(a_full_channel_times_out_too) {
  World world(2);
  Ints large(kRingBytes);
  Request request = ranks::send(DType::int32, ranks::piece(large), 1);
  request.timeout_s = 0.2;
  const auto failure = ranks::failure_of(*world[0].post(request));
  CHECK(failure && failure->kind == FailureKind::timeout);
  CHECK(failure->ranks == std::vector<int>{1});
}

TEST(a_peer_that_closes_or_ends_fails_what_waits_for_it) {
  for (bool closes : {true, false}) {
    World world(2);
    Ints a(5), b(5), large(kRingBytes);
    std::vector<std::shared_ptr<Work>> works;
    works.push_back(post_recv(world[0], a, 1));
    works.push_back(post_recv(world[0], b, 1, 1));
    works.push_back(post_send(world[0], large, 1));
    const double start = now_s();
    if (closes) {
      world[1].close();
    } else {
      world[1] = Rank{};
    }
    for (const auto& work : works) {
      const auto failure = ranks::failure_of(*work);
      CHECK(failure && failure->kind == FailureKind::peer_lost);
      CHECK(failure->ranks == std::vector<int>{1});
    }
    CHECK(now_s() - start < 1);
  }
}

TEST(the_group_s_failure_ends_messages_here_and_there) {
  World world(2);
  Ints a(5), b(5);
  const auto here = post_recv(world[0], a, 1);
  const auto there = post_recv(world[1], b, 0);
  const double start = now_s();
  world[0].abort("enough");
  for (const auto& work : {here, there}) {
    const auto failure = ranks::failure_of(*work);
    CHECK(failure && failure->kind == FailureKind::aborted);
    CHECK(std::strstr(failure->what(), "enough") != nullptr);
  }
  CHECK(now_s() - start < 1);
}

TEST(closing_fails_what_is_pending) {
  World world(2);
  Ints buffer(5), large(kRingBytes);
  const auto got = post_recv(world[0], buffer, 1);
  const auto sent = post_send(world[0], large, 1);
  world[0].close();
  for (const auto& work : {got, sent}) {
    CHECK(work->completed());
    CHECK(work->failure() && work->failure()->kind == FailureKind::closed);
  }
  CHECK_THROWS(post_recv(world[0], buffer, 1), Failure, "closed");
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

TEST(what_is_taken_back_has_no_part_in_a_failure) {
  World world(2);
  Ints taken(1), left(1);
  const auto mine = post_recv(world[0], taken, -1);
  const auto other = post_recv(world[0], left, -1);
  CHECK(world[0].point_to_point->take_back(*mine).has_value());
  world[0].close();
  CHECK(ranks::failure_of(*other)->kind == FailureKind::closed);
  CHECK(!mine->completed());
  CHECK(!world[0].point_to_point->take_back(*other));
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

TEST(a_part_of_a_larger_group_waits_for_ranks_elsewhere) {
  ranks::Links links(2, ranks::kStagingBytes);
  std::vector<std::shared_ptr<Communicator>> communicators;
  std::vector<std::shared_ptr<PointToPoint>> messages;
  for (int r = 0; r < 2; ++r) {
    sdp::Links own = links.take(r);
    own.ids = {1, 3};
    own.group_size = 4;
    communicators.push_back(std::make_shared<Communicator>(std::move(own), ranks::kStagingBytes));
    messages.push_back(std::make_shared<PointToPoint>(communicators.back(), -1));
  }
  Ints buffer(1);
  Request any = ranks::recv(DType::int32, ranks::piece(buffer), -1, 4);
  any.seq = 9;
  const auto work = messages[0]->submit(any);
  messages[1]->close();
  CHECK(!work->wait(0.3));  // another node's may come
  messages[0]->others_have_left();
  const auto failure = ranks::failure_of(*work);
  CHECK(failure && failure->kind == FailureKind::peer_lost);
  CHECK(failure->ranks == std::vector<int>{3});
  CHECK(std::strstr(failure->what(), "[rank 1/4] recv #9 int32[1] from any rank tag 4: ") !=
        nullptr);
  messages[0]->close();
}
