// What can be told to be wrong without any other rank.
#include <limits>

#include "check.hpp"
#include "request.hpp"

using namespace sdp;

namespace {
constexpr int kWorld = 3;
std::byte memory[64];

std::vector<Piece> pieces(std::size_t n, std::uint64_t count = 2) {
  return std::vector<Piece>(n, Piece{memory, count});
}

Request make(Op op, std::size_t n_sends, std::size_t n_recvs, int root = -1) {
  Request request;
  request.op = op;
  request.dtype = DType::float32;
  request.root = root;
  request.sends = pieces(n_sends);
  request.recvs = pieces(n_recvs);
  return request;
}

// How many buffers each operation takes on rank 1 of 3, whether or not that is the root; all_reduce
// takes that many at least.
struct Shape {
  Op op;
  std::size_t sends, recvs, root_sends, root_recvs;
};
constexpr Shape kShapes[] = {{Op::all_reduce, 0, 1, 0, 1}, {Op::reduce, 0, 1, 0, 1},
                             {Op::broadcast, 0, 1, 0, 1},  {Op::all_gather, 1, 3, 1, 3},
                             {Op::gather, 1, 0, 1, 3},     {Op::scatter, 0, 1, 3, 1},
                             {Op::all_to_all, 3, 3, 3, 3}, {Op::reduce_scatter, 3, 1, 3, 1}};

bool valid(const Request& request) {
  try {
    request.validate(1, kWorld);
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}
}  // namespace

TEST(each_operation_takes_its_number_of_buffers) {
  for (const Shape& shape : kShapes) {
    for (int root : {0, 1}) {
      const std::size_t sends = root == 1 ? shape.root_sends : shape.sends;
      const std::size_t recvs = root == 1 ? shape.root_recvs : shape.recvs;
      CHECK(valid(make(shape.op, sends, recvs, root)));
      CHECK_EQ(valid(make(shape.op, sends, recvs + 1, root)), shape.op == Op::all_reduce);
      if (recvs > 0) CHECK(!valid(make(shape.op, sends, recvs - 1, root)));
      if (sends > 0) CHECK(!valid(make(shape.op, sends - 1, recvs, root)));
      if (sends > 0) CHECK(!valid(make(shape.op, sends + 1, recvs, root)));
    }
  }
}

TEST(the_buffer_of_an_all_reduce_may_lie_in_any_number_of_pieces) {
  CHECK_THROWS(make(Op::all_reduce, 0, 0).validate(1, kWorld), std::invalid_argument,
               "all_reduce: needs 1 in-place buffer(s), got 0");
  for (std::size_t n : {1, 2, 3, 1000}) {
    Request request = make(Op::all_reduce, 0, n);
    CHECK(valid(request));
    CHECK_EQ(request.count(), 2 * n);
    CHECK_EQ(request.signature().shape(RankNames()), "float32[" + std::to_string(2 * n) + "] sum");
    request.recvs.back() = {nullptr, 0};
    CHECK(valid(request));
    CHECK_EQ(request.count(), 2 * (n - 1));
    request.recvs.back() = {nullptr, 1};
    CHECK(!valid(request));
  }
}

TEST(roots_are_ranks) {
  for (Op op : {Op::reduce, Op::broadcast}) {
    for (int root : {-1, 3, 1000}) CHECK(!valid(make(op, 0, 1, root)));
    for (int root : {0, 1, 2}) CHECK(valid(make(op, 0, 1, root)));
  }
  CHECK(valid(make(Op::all_reduce, 0, 1, -1)));
  CHECK_THROWS(make(Op::broadcast, 0, 1, 3).validate(1, kWorld), std::invalid_argument,
               "broadcast: root 3 is not a rank of this group of 3");
}

TEST(peers_are_other_ranks) {
  for (int peer = -2; peer <= 4; ++peer) {
    Request send = make(Op::send, 1, 0);
    Request recv = make(Op::recv, 0, 1);
    send.peer = recv.peer = peer;
    CHECK_EQ(valid(send), peer == 0 || peer == 2);
    CHECK_EQ(valid(recv), peer == -1 || peer == 0 || peer == 2);
  }
}

TEST(pieces_of_a_reduce_scatter_are_equal) {
  Request request = make(Op::reduce_scatter, 3, 1);
  request.sends[1].count = 1;
  CHECK_THROWS(request.validate(1, kWorld), std::invalid_argument, "the output's size");
}

TEST(what_a_rank_gives_itself_has_one_size) {
  Request gather = make(Op::all_gather, 1, 3);
  gather.recvs[1].count = 1;
  CHECK_THROWS(gather.validate(1, kWorld), std::invalid_argument,
               "all_gather: this rank's own output has 1 elements, its input 2");
  gather.validate(0, kWorld);  // the business of rank 1 alone
  Request exchange = make(Op::all_to_all, 3, 3);
  exchange.sends[1].count = 1;
  CHECK_THROWS(exchange.validate(1, kWorld), std::invalid_argument, "this rank's own output");
  Request scatter = make(Op::scatter, 3, 1, 1);
  scatter.sends[1].count = 1;
  CHECK_THROWS(scatter.validate(1, kWorld), std::invalid_argument, "this rank's own output");
}

TEST(buffers_have_memory_and_a_size_that_can_be) {
  Request request = make(Op::all_reduce, 0, 1);
  request.recvs[0] = {nullptr, 0};
  CHECK(valid(request));
  request.recvs[0] = {nullptr, 1};
  CHECK_THROWS(request.validate(1, kWorld), std::invalid_argument, "a buffer has no memory");
  const std::uint64_t most = std::numeric_limits<std::int64_t>::max() / 4;
  request.recvs[0] = {memory, most};
  CHECK(valid(request));
  request.recvs[0] = {memory, most + 1};
  CHECK_THROWS(request.validate(1, kWorld), std::invalid_argument, "larger than any memory");
}

TEST(descriptions_say_what_matters) {
  CHECK_EQ(make(Op::all_reduce, 0, 1).signature().shape(RankNames()), "float32[2] sum");
  CHECK_EQ(make(Op::broadcast, 0, 1, 2).signature().shape(RankNames()), "float32[2] root 2");
  CHECK_EQ(make(Op::reduce, 0, 1, 0).signature().shape(RankNames()), "float32[2] sum root 0");
  CHECK_EQ(make(Op::barrier, 0, 0).signature().shape(RankNames()), "");
  Request send = make(Op::send, 1, 0);
  send.peer = 2;
  send.tag = 7;
  CHECK_EQ(send.signature().shape(RankNames()), "float32[2] to rank 2 tag 7");
  Request recv = make(Op::recv, 0, 1);
  CHECK_EQ(recv.signature().shape(RankNames()), "float32[2] from any rank tag 0");
}
