// Memory that operations have in common: compared with a look at every pair.
#include <algorithm>
#include <random>

#include "aliased_inputs.hpp"
#include "check.hpp"

using namespace sdp;

namespace {
constexpr int kWorld = 4;
constexpr int kRank = 2;
constexpr std::size_t kItem = 4;
std::byte memory[400];

Piece at(std::size_t item, std::uint64_t count) {
  return {memory + item * kItem, count};
}

Request request(std::vector<Piece> sends, std::vector<Piece> recvs) {
  Request made;
  made.dtype = DType::float32;
  made.sends = std::move(sends);
  made.recvs = std::move(recvs);
  return made;
}

std::vector<std::size_t> aliased(std::vector<Piece> sends, std::vector<Piece> recvs) {
  return aliased_inputs(request(std::move(sends), std::move(recvs)), kRank);
}

bool share(const std::vector<Piece>& some, const std::vector<Piece>& others) {
  return std::ranges::any_of(some, [&](const Piece& a) {
    return std::ranges::any_of(others, [&](const Piece& b) {
      return std::max(a.data, b.data) <
             std::min(a.data + a.count * kItem, b.data + b.count * kItem);
    });
  });
}

std::vector<std::size_t> of_every_pair(const std::vector<Piece>& sends,
                                       const std::vector<Piece>& recvs) {
  const auto is_own = [](const std::vector<Piece>& list, std::size_t i) {
    return list.size() == 1 || i == kRank;
  };
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < sends.size(); ++i) {
    bool wrong = false;
    for (std::size_t j = 0; j < recvs.size(); ++j) {
      const Piece &a = sends[i], &b = recvs[j];
      const auto begin = std::max(a.data, b.data);
      const auto end = std::min(a.data + a.count * kItem, b.data + b.count * kItem);
      const bool own = is_own(sends, i) && is_own(recvs, j);
      wrong |= begin < end && !(own && a.data == b.data && a.count == b.count);
    }
    if (wrong) found.push_back(i);
  }
  return found;
}

// Pieces with gaps between them, some of them empty, in any order.
std::vector<Piece> apart(std::mt19937& random, std::size_t n) {
  const auto up_to = [&](std::size_t most) { return random() % (most + 1); };
  std::vector<Piece> pieces;
  for (std::size_t i = 0, item = up_to(40); i < n; ++i) {
    pieces.push_back(at(item, up_to(6)));
    item += pieces.back().count + up_to(3);
  }
  std::ranges::shuffle(pieces, random);
  return pieces;
}
}  // namespace

TEST(any_pieces) {
  std::mt19937 random(1);
  int overlapping = 0;
  for (int turn = 0; turn < 20'000; ++turn) {
    const auto sends = apart(random, random() % 2 ? 1 : kWorld);
    auto recvs = apart(random, random() % 2 ? 1 : kWorld);
    if (random() % 4 == 0) recvs = sends;
    const auto expected = of_every_pair(sends, recvs);
    CHECK(aliased(sends, recvs) == expected);
    overlapping += !expected.empty();
  }
  CHECK(overlapping > 5'000 && overlapping < 15'000);
}

TEST(what_a_rank_keeps_may_lie_in_place) {
  const std::vector<Piece> whole = {at(0, 5), at(5, 5), at(10, 5), at(15, 5)};
  CHECK(aliased({whole[kRank]}, whole).empty());
  CHECK(aliased(whole, {whole[kRank]}).empty());
  CHECK(aliased(whole, whole) == (std::vector<std::size_t>{0, 1, 3}));
  CHECK(aliased(whole, {whole[0]}) == std::vector<std::size_t>{0});
  CHECK(aliased({at(12, 5)}, whole) == std::vector<std::size_t>{0});
  CHECK(aliased(whole, {}).empty() && aliased({}, whole).empty());
}
