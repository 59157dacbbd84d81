// How send and recv end: mismatches, time-outs, peers that leave, aborts, the group's end.
#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
std::shared_ptr<Work> post_send(Rank& rank, Ints& buffer, int to, std::uint32_t tag = 0) {
  return rank.post(ranks::send(DType::int32, ranks::piece(buffer), to, tag));
}
std::shared_ptr<Work> post_recv(Rank& rank, Ints& buffer, int from, std::uint32_t tag = 0) {
  return rank.post(ranks::recv(DType::int32, ranks::piece(buffer), from, tag));
}
}  // namespace

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
