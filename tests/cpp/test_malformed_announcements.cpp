// A peer may have written anything. Whatever it is, this rank gets a Failure in time and touches
// nothing that is not its own. (Around every mapping lies forbidden memory: shared_mappings.cpp.)
// Here: its announcement, the splits, and the header of its segment.
//
// Rank 0 runs as usual. Rank 1 is played by the test.
#include "check.hpp"
#include "malformed.hpp"
#include "ranks.hpp"

using namespace sdp;
using namespace malformed;
using ranks::expect_failure;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
// What rank 1 would have announced, had it been honest, and what it showed.
struct Announced {
  Announcement announcement{};
  std::vector<std::uint64_t> splits, expected;
};

// `request`: rank 0's. Rank 1 plays the same part.
Announced honest(const Request& request) {
  Announced made;
  made.announcement.seq = 1;
  made.announcement.operation = request.signature();
  const bool in_place = request.op == Op::all_reduce;
  std::size_t nbytes = 0;
  for (const Piece& piece : in_place ? request.recvs : request.sends) {
    made.splits.push_back(piece.count);
    nbytes += piece.count * itemsize(request.dtype);
  }
  for (const Piece& piece : request.recvs) made.expected.push_back(piece.count);
  made.announcement.pieces = static_cast<std::uint16_t>(made.splits.size());
  made.announcement.inlined = nbytes <= kInlineBytes;
  // A large all_reduce has no use for pieces.
  if (in_place && made.announcement.inlined == 0) made.announcement.pieces = 0;
  return made;
}

// Rank 0 runs `request` with a rank 1 that announced this and then goes on as if all were well.
std::optional<Failure> meet(Request request, const Announced& announced) {
  World world(2);
  const Segment& theirs = world[1].communicator->peers().own();
  theirs.announcement(1) = announced.announcement;
  std::copy(announced.splits.begin(), announced.splits.end(), theirs.splits(1));
  std::copy(announced.expected.begin(), announced.expected.end(), theirs.expected(1));
  theirs.header().step.publish(1'000);
  request.timeout_s = 0.3;
  return world.failures([&](int r, Rank& rank) {
    if (r == 0) rank.run(request);
  })[0];
}

struct Buffers {
  explicit Buffers(std::size_t count) : a(count), b(count), c(count), d(count) {}
  Ints a, b, c, d;
  std::vector<Piece> inputs() { return {ranks::piece(a), ranks::piece(b)}; }
  std::vector<Piece> outputs() { return {ranks::piece(c), ranks::piece(d)}; }
};

Request gathering(Buffers& buffers) {
  Request request = ranks::request(Op::all_gather, DType::int32);
  request.sends = {ranks::piece(buffers.a)};
  request.recvs = buffers.outputs();
  return request;
}
Request exchanging(Buffers& buffers) {
  Request request = ranks::request(Op::all_to_all, DType::int32);
  request.sends = buffers.inputs();
  request.recvs = buffers.outputs();
  return request;
}
Request reducing_pieces(Buffers& buffers) {
  Request request = ranks::request(Op::reduce_scatter, DType::int32);
  request.sends = buffers.inputs();
  request.recvs = {ranks::piece(buffers.c)};
  return request;
}
Request reducing(Buffers& buffers) {
  return ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffers.a));
}

using Make = Request (*)(Buffers&);

// `change` turns what an honest rank announces into something else, for small and large payloads.
template <class Change>
void expect_mismatch(Make make, Change&& change, const std::string& part = "") {
  for (std::size_t count : {std::size_t{5}, kLarge}) {
    Buffers buffers(count);
    const Request request = make(buffers);
    Announced announced = honest(request);
    change(announced);
    expect_failure(meet(request, announced), FailureKind::mismatch, part);
  }
}
}  // namespace

TEST(an_honest_announcement_passes) {
  for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
    for (std::size_t count : {std::size_t{5}, kLarge}) {
      Buffers buffers(count);
      const auto failure = meet(make(buffers), honest(make(buffers)));
      CHECK_EQ(failure ? failure->what() : std::string(), "");
    }
  }
}

TEST(wrong_numbers_of_pieces) {
  for (Make make : {gathering, exchanging, reducing_pieces}) {
    for (int pieces : {0, 3, 200, 65535}) {
      expect_mismatch(make, [&](Announced& one) {
        one.announcement.pieces = static_cast<std::uint16_t>(pieces);
      });
    }
  }
  expect_mismatch(exchanging, [](Announced& one) { one.announcement.pieces = 1; });
  expect_mismatch(reducing_pieces, [](Announced& one) { one.announcement.pieces = 1; });
}

TEST(absurd_lengths) {
  for (Make make : {gathering, exchanging, reducing_pieces}) {
    for (std::uint64_t length : {kHuge, kMost, kMost / 4, std::uint64_t{1} << 40}) {
      for (std::size_t which : {0, 1}) {
        expect_mismatch(make, [&](Announced& one) {
          one.splits[which % one.splits.size()] = length;
          one.announcement.operation.count = length;
        });
      }
    }
  }
}

TEST(a_broadcast_of_another_length_than_announced) {
  for (std::uint64_t length : {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{8192}}) {
    Buffers buffers(5);
    Request request = ranks::in_place(Op::broadcast, DType::int32, ranks::piece(buffers.a));
    request.root = 1;
    Announced announced = honest(request);
    announced.splits = {length};
    announced.announcement.pieces = 1;
    announced.announcement.inlined = 1;
    expect_failure(meet(request, announced), FailureKind::mismatch, "impossible pieces");
  }
}

// The first length sends the reader of the second piece far away; the sum wraps to what is
// expected.
TEST(lengths_whose_sum_wraps_around) {
  expect_mismatch(exchanging, [](Announced& one) { one.splits = {one.splits[0], kMost}; });
  expect_mismatch(exchanging, [](Announced& one) {
    one.splits = {one.splits[0] + kHuge * 2, one.splits[1]};
    one.expected[1] = one.splits[0];
  });
}

// Whatever rank 1 takes and offers to itself is its own affair, but it must not lead us astray.
TEST(a_wrong_length_for_itself) {
  for (std::uint64_t length : {kHuge, kMost, std::uint64_t{100'000}}) {
    Buffers buffers(5);
    Announced announced = honest(exchanging(buffers));
    announced.splits[1] = announced.expected[1] = length;
    announced.announcement.operation.count = length;
    expect_failure(meet(exchanging(buffers), announced), FailureKind::mismatch, "");
  }
}

// Rank 0 is the impostor: its first piece sends the reader of the second one out of the segment.
TEST(a_wrong_length_before_the_piece_that_is_read) {
  for (std::uint64_t length : {kHuge, kMost, kMost - 5, std::uint64_t{8192}}) {
    World world(2);
    Buffers buffers(5);
    Request request = exchanging(buffers);
    Announced announced = honest(request);
    announced.splits[0] = announced.expected[0] = announced.announcement.operation.count = length;
    const Segment& theirs = world[0].communicator->peers().own();
    theirs.announcement(1) = announced.announcement;
    std::copy(announced.splits.begin(), announced.splits.end(), theirs.splits(1));
    std::copy(announced.expected.begin(), announced.expected.end(), theirs.expected(1));
    theirs.header().step.publish(1'000);
    CHECK_THROWS(world[1].run(request), Failure, "rank 0 announced impossible pieces");
  }
}

TEST(lengths_of_reductions_that_are_not_the_announced_count) {
  expect_mismatch(reducing_pieces, [](Announced& one) { one.splits[0] = 1; });
  expect_mismatch(reducing_pieces, [](Announced& one) { one.splits[1] += 1; });
}

TEST(flags_that_are_neither_true_nor_false) {
  for (int flag : {2, 255}) {
    for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
      for (std::size_t count : {std::size_t{5}, kLarge}) {
        Buffers buffers(count);
        Announced announced = honest(make(buffers));
        std::memset(&announced.announcement.inlined, flag, 1);
        meet(make(buffers), announced);  // may fail or time out, must come back
      }
    }
  }
}

// "Inline", but as large as it gets; or not inline though it is small.
TEST(a_payload_that_is_not_where_it_should_be) {
  for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
    for (std::size_t count : {std::size_t{5}, kLarge}) {
      for (int flag : {0, 1}) {
        Buffers buffers(count);
        Announced announced = honest(make(buffers));
        announced.announcement.inlined = flag;
        meet(make(buffers), announced);  // wrong data, perhaps, but in bounds
      }
    }
  }
}

TEST(garbage_instead_of_a_record) {
  for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
    expect_mismatch(
        reducing,
        [&](Announced& one) {
          std::memset(static_cast<void*>(&one.announcement), byte, sizeof one.announcement);
        },
        "ranks disagree: rank 0: all_reduce #1 int32[");
  }
}

TEST(types_and_operations_that_do_not_exist) {
  expect_mismatch(reducing,
                  [](Announced& one) { one.announcement.operation.op = static_cast<Op>(250); });
  expect_mismatch(
      reducing, [](Announced& one) { one.announcement.operation.dtype = static_cast<DType>(99); });
  expect_mismatch(reducing, [](Announced& one) {
    one.announcement.operation.reduce_op = static_cast<ReduceOp>(77);
  });
}

TEST(a_cause_without_an_end) {
  World world(2);
  Header& header = world[1].header();
  std::memset(static_cast<void*>(&header.failure), 'x', sizeof header.failure);
  header.failure.kind = static_cast<FailureKind>(0xdeadbeef);
  for (auto& rank : header.failure.ranks) rank = 0x7fffffff;
  header.state = PeerState::failed;
  Request request = ranks::request(Op::barrier, DType::uint8);
  try {
    world[0].run(request);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.kind == FailureKind::peer_lost);
    CHECK(failure.ranks == std::vector<int>{1});
    CHECK(std::strlen(failure.what()) < 1000);
  }
}

TEST(a_state_that_does_not_exist) {
  World world(2);
  world[1].header().state = static_cast<PeerState>(77);
  CHECK_THROWS(world[0].run(ranks::request(Op::barrier, DType::uint8)), Failure, "rank 1");
}
