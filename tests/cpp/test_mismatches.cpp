// What every rank sees when the ranks disagree about an operation.
#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::all_reduce;
using ranks::expect_failure;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;
using Failures = std::vector<std::optional<Failure>>;

namespace {
// All ranks run what `make` gives them for a buffer of theirs, which must stay as it was.
Failures mismatch(int size, const std::function<Request(int, Ints&)>& make, std::size_t count = 8) {
  World world(size);
  return world.failures([&](int r, Rank& rank) {
    rank.run(ranks::request(Op::barrier, DType::uint8));
    Ints buffer(r == size - 1 ? count : 8, r + 1);
    const Ints before = buffer;
    Request request = make(r, buffer);
    try {
      rank.run(std::move(request));
    } catch (const Failure&) {
      CHECK(buffer == before);
      throw;
    }
  });
}

void check_mismatch(const Failures& failures, const std::string& table) {
  const int last = static_cast<int>(failures.size()) - 1;
  for (std::size_t r = 0; r < failures.size(); ++r) {
    const auto& failure = failures[r];
    expect_failure(failure, FailureKind::mismatch, {last}, table);
    expect_failure(failure, FailureKind::mismatch,
                   "(last completed: barrier #1). Hint: all ranks must call");
    const std::string text = failure->what();
    const std::string who = "[rank " + std::to_string(r) + "/" + std::to_string(last + 1) + "] ";
    CHECK_EQ(text.substr(0, who.size()), who);
    CHECK_EQ(failure->seq, 2);
    CHECK(!failure->op.empty());
    CHECK(failure->elapsed_s >= 0 && failure->elapsed_s < ranks::kTimeoutS);
  }
}
}  // namespace

TEST(another_operation) {
  check_mismatch(mismatch(3,
                          [](int r, Ints& buffer) {
                            return r < 2 ? all_reduce(buffer)
                                         : ranks::in_place(Op::broadcast, DType::int32,
                                                           ranks::piece(buffer), 1);
                          }),
                 "ranks disagree: ranks 0, 1: all_reduce #2 int32[8] sum; rank 2: broadcast #2 "
                 "int32[8] root 1");
}

TEST(another_type) {
  check_mismatch(mismatch(4,
                          [](int r, Ints& buffer) {
                            Request request = all_reduce(buffer);
                            if (r == 3) request.dtype = DType::float32;
                            return request;
                          }),
                 "ranks disagree: ranks 0-2: all_reduce #2 int32[8] sum; rank 3: all_reduce #2 "
                 "float32[8] sum");
}

TEST(another_reduction) {
  check_mismatch(mismatch(3,
                          [](int r, Ints& buffer) {
                            Request request = all_reduce(buffer);
                            if (r == 2) request.reduce_op = ReduceOp::max;
                            return request;
                          }),
                 "ranks 0, 1: all_reduce #2 int32[8] sum; rank 2: all_reduce #2 int32[8] max");
}

TEST(another_size) {
  const auto make = [](int, Ints& buffer) { return all_reduce(buffer); };
  check_mismatch(mismatch(3, make, 9),
                 "ranks 0, 1: all_reduce #2 int32[8] sum; rank 2: all_reduce");
  // So large that the ranks do not even take the same path.
  check_mismatch(mismatch(3, make, 100'000), "rank 2: all_reduce #2 int32[100000] sum");
}

TEST(another_root) {
  check_mismatch(
      mismatch(3,
               [](int r, Ints& buffer) {
                 return ranks::in_place(Op::reduce, DType::int32, ranks::piece(buffer),
                                        r == 2 ? 1 : 0);
               }),
      "ranks 0, 1: reduce #2 int32[8] sum root 0; rank 2: reduce #2 int32[8] sum root 1");
}

TEST(all_different) {
  World world(3);
  const auto failures = world.failures([&](int r, Rank& rank) {
    Ints buffer(static_cast<std::size_t>(r + 1));
    rank.run(all_reduce(buffer));
  });
  for (const auto& failure : failures) {
    expect_failure(
        failure, FailureKind::mismatch, {1, 2},
        "rank 0: all_reduce #1 int32[1] sum; rank 1: all_reduce #1 int32[2] sum; rank 2: "
        "all_reduce #1 int32[3] sum");
  }
}

TEST(a_rank_that_skips_an_operation_is_told_by_its_number) {
  World world(2);
  world[0].communicator->peers();  // both alive
  const auto failures = world.failures([&](int r, Rank& rank) {
    Ints a(4), b(5);
    if (r == 0) rank.run(all_reduce(a));
    rank.run(all_reduce(b));
  });
  expect_failure(failures[0], FailureKind::mismatch, {1}, "rank 0: all_reduce #1 int32[4] sum");
  expect_failure(failures[1], FailureKind::mismatch, {1}, "rank 1: all_reduce #1 int32[5] sum");
}

TEST(pieces_of_unexpected_length_are_named) {
  World world(2);
  const auto failures = world.failures([&](int r, Rank& rank) {
    Ints mine(r == 0 ? 4 : 5), first(4), second(r == 0 ? 4 : 5);
    Request request = ranks::request(Op::all_gather, DType::int32);
    request.sends = {ranks::piece(mine)};
    request.recvs = {ranks::piece(first), ranks::piece(second)};
    rank.run(std::move(request));
  });
  for (const auto& failure : failures) {
    expect_failure(failure, FailureKind::mismatch, {0, 1},
                   "rank 0 expects 4 elements of rank 1, which offers 5");
  }
}
