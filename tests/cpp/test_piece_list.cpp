// A buffer in several pieces: every range of it, run by run.
#include <random>

#include "check.hpp"
#include "collectives/piece_list.hpp"

using namespace sdp;

namespace {
constexpr std::size_t kItem = 2;

// Pieces with gaps between them, backwards in memory: only `PieceList` can tell which is next.
class Pieces {
 public:
  explicit Pieces(const std::vector<std::size_t>& counts) {
    for (std::size_t count : counts) {
      at_ -= count * kItem + 1;
      pieces_.push_back({memory_ + at_, count});
      for (std::size_t i = 0; i < count; ++i) elements_.push_back(memory_ + at_ + i * kItem);
    }
  }
  PieceList list() const { return {pieces_, kItem}; }
  std::size_t count() const { return elements_.size(); }

  void check(Range range) const {
    std::size_t covered = 0;
    list().each(range, [&](std::byte* data, std::size_t n, std::size_t done) {
      CHECK(n > 0);
      CHECK_EQ(done, covered);
      CHECK(done + n <= range.count);
      for (std::size_t i = 0; i < n; ++i) {
        CHECK(data + i * kItem == elements_[range.begin + done + i]);
      }
      covered += n;
      // As long as can be: it ends with its piece or with the range.
      const bool ends_piece =
          range.begin + covered == count() || elements_[range.begin + covered] != data + n * kItem;
      CHECK(covered == range.count || ends_piece);
    });
    CHECK_EQ(covered, range.count);
  }
  void check_all_ranges() const {
    CHECK_EQ(list().count(), count());
    for (std::size_t begin = 0; begin <= count(); ++begin) {
      for (std::size_t n = 0; begin + n <= count(); ++n) check({begin, n});
    }
  }

 private:
  std::byte memory_[1024];
  std::size_t at_ = sizeof memory_;
  std::vector<Piece> pieces_;
  std::vector<std::byte*> elements_;  // where each one lies
};
}  // namespace

TEST(ranges_of_random_pieces) {
  std::mt19937 random(3);
  for (int model = 0; model < 300; ++model) {
    std::vector<std::size_t> counts(random() % 8);
    for (std::size_t& count : counts) count = random() % 3 == 0 ? 0 : random() % 9;
    Pieces(counts).check_all_ranges();
  }
}

TEST(empty_pieces_anywhere) {
  for (const std::vector<std::size_t>& counts : std::vector<std::vector<std::size_t>>{
           {},
           {0},
           {0, 0, 0},
           {5},
           {0, 5},
           {5, 0},
           {0, 0, 5, 0, 0, 3, 0},
           {3, 0, 0, 5},
       }) {
    Pieces(counts).check_all_ranges();
  }
}

// What a framework gives for a tensor without elements.
TEST(empty_pieces_without_memory_are_never_visited) {
  std::byte memory[8];
  const Piece pieces[] = {{nullptr, 0}, {memory, 4}, {nullptr, 0}};
  int visits = 0;
  PieceList(pieces, kItem).each({0, 4}, [&](std::byte* data, std::size_t n, std::size_t) {
    CHECK(data == memory);
    CHECK_EQ(n, 4);
    ++visits;
  });
  CHECK_EQ(visits, 1);
}
