// all_reduce against the reference, bit for bit: types, reductions, pieces, staging areas.
#include <array>
#include <cstring>
#include <random>
#include <set>

#include "check.hpp"
#include "ranks.hpp"
#include "reference.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using reference::Bytes;

namespace {
constexpr int kMostRanks = 4;

void check_path(Rank& rank, Path expected) {
  CHECK_EQ(name(rank.communicator->last_path()), name(expected));
}

// The same elements in pieces that lie apart, some of them empty.
class Pieces {
 public:
  Pieces(const Bytes& whole, std::size_t item, std::uint32_t seed) : item_(item) {
    std::mt19937 random(seed);
    const std::size_t count = whole.size() / item;
    std::size_t at = 0;
    for (std::size_t n = 0; at < count; at += n) {
      const std::size_t most = random() % 4 == 0 ? count : 100;
      n = random() % 4 == 0 ? 0 : std::min(count - at, random() % most);
      add(whole, at, n);
    }
    add(whole, at, 0);
  }
  std::vector<Piece> pieces() {
    std::vector<Piece> all;
    for (Bytes& part : parts_) all.push_back({part.data(), part.size() / item_});
    return all;
  }
  Bytes whole() const {
    Bytes all;
    for (const Bytes& part : parts_) all.insert(all.end(), part.begin(), part.end());
    return all;
  }

 private:
  void add(const Bytes& whole, std::size_t at, std::size_t n) {
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(at * item_);
    parts_.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(n * item_));
  }
  std::size_t item_;
  std::vector<Bytes> parts_;
};

struct Reduction {
  DType dtype;
  ReduceOp op;
};
constexpr Reduction kReductions[] = {{DType::float32, ReduceOp::avg},
                                     {DType::float32, ReduceOp::premul_sum},
                                     {DType::bfloat16, ReduceOp::sum},
                                     {DType::int8, ReduceOp::product},
                                     {DType::boolean, ReduceOp::bor}};
}  // namespace

// Results along the one tree, rounded once, whatever the path.
TEST(every_type_and_reduction_has_the_reference_s_bits_on_all_paths) {
  World world(3);
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!reference::defined(dtype, op)) continue;
      const std::vector<double> factors{0.5, -3, 1.0 / 3};
      for (std::size_t nbytes : {48u, 40'000u}) {
        const std::size_t count = nbytes / itemsize(dtype);
        std::vector<Bytes> inputs;
        for (std::uint32_t r = 0; r < 3; ++r) inputs.push_back(reference::sample(dtype, count, r));
        const Bytes expected = reference::reduce(dtype, op, inputs, factors);
        std::vector<Bytes> results(3);
        world.each([&](int r, Rank& rank) {
          Bytes buffer = inputs[static_cast<std::size_t>(r)];
          Request made = ranks::in_place(Op::all_reduce, dtype, {buffer.data(), count});
          made.reduce_op = op;
          made.factor = factors[static_cast<std::size_t>(r)];
          rank.run(std::move(made));
          CHECK(reference::same(dtype, buffer, expected));
          results[static_cast<std::size_t>(r)] = buffer;
        });
        CHECK(results[0] == results[1] && results[1] == results[2]);
      }
    }
  }
}

// `n` pieces with gaps between them, in turn in either of two areas, cut elsewhere for each seed.
std::vector<Piece> spread(const Bytes& whole, std::size_t item, std::size_t n, std::uint32_t seed,
                          std::array<std::byte*, 2> areas) {
  std::mt19937 random(seed);
  std::set<std::size_t> ends{whole.size() / item};
  while (ends.size() < n) ends.insert(1 + random() % (whole.size() / item));
  std::vector<Piece> pieces;
  std::size_t at = 0;
  for (const std::size_t end : ends) {
    std::byte*& area = areas[pieces.size() % 2];
    const std::size_t nbytes = (end - at) * item;
    std::memcpy(area, whole.data() + at * item, nbytes);
    pieces.push_back({area, end - at});
    area += nbytes + item;
    at = end;
  }
  return pieces;
}

TEST(pieces_in_registered_memory_are_reduced_in_place) {
  constexpr std::size_t kBytes = 184'320, kArea = kBytes + 8 * kMostRuns;
  std::uint32_t seed = 50'000;
  for (int size = 1; size <= kMostRanks; ++size) {
    World world(size);
    std::vector<std::array<std::byte*, 2>> areas;
    for (int r = 0; r < size; ++r) {
      Communicator& communicator = *world[r].communicator;
      areas.push_back({communicator.allocate(kArea).data, communicator.allocate(kArea).data});
    }
    for (const Reduction& reduction : kReductions) {
      for (const std::size_t n : {std::size_t{1}, std::size_t{6}, kMostRuns, kMostRuns + 1}) {
        seed += 10;
        world.each([&](int r, Rank& rank) {
          const std::size_t item = itemsize(reduction.dtype);
          const std::uint32_t my_seed = seed + static_cast<std::uint32_t>(r);
          const Bytes input = reference::sample(reduction.dtype, kBytes / item, my_seed);
          const auto run = [&](std::vector<Piece> pieces) {
            Request made = ranks::request(Op::all_reduce, reduction.dtype);
            made.reduce_op = reduction.op;
            made.factor = r - 1.5;
            made.recvs = std::move(pieces);
            rank.run(std::move(made));
          };
          Bytes whole = input;
          run({{whole.data(), kBytes / item}});
          const std::vector<Piece> pieces =
              spread(input, item, n, my_seed, areas[static_cast<std::size_t>(r)]);
          run(pieces);
          check_path(rank, n <= kMostRuns ? Path::zero_copy : Path::staged);
          Bytes result;
          for (const Piece& piece : pieces) {
            result.insert(result.end(), piece.data, piece.data + piece.count * item);
          }
          CHECK(reference::same(reduction.dtype, result, whole));
        });
      }
    }
  }
}

// Each rank cuts its buffer in its own way; in the end rank 0's is one registered piece, which must
// not make the ranks disagree about the path.
TEST(all_reduce_of_pieces_has_the_bits_of_one_buffer) {
  constexpr std::size_t kSlotBytes = 36'864;  // a round; more than what travels inline
  std::uint32_t seed = 0;
  for (int size = 1; size <= kMostRanks; ++size) {
    World world(size, kSlots * kSlotBytes);
    std::byte* const registered = world[0].communicator->allocate(5 * kSlotBytes).data;
    const auto check = [&](Reduction reduction, std::size_t nbytes) {
      const auto [dtype, reduce_op] = reduction;
      const std::size_t item = itemsize(dtype);
      const std::uint32_t case_seed = seed++ * 100;
      std::vector<Bytes> results(static_cast<std::size_t>(size));
      world.each([&, dtype = dtype, reduce_op = reduce_op](int r, Rank& rank) {
        const std::uint32_t my_seed = case_seed + static_cast<std::uint32_t>(r) * 10;
        const auto run = [&](std::vector<Piece> pieces) {
          Request made = ranks::request(Op::all_reduce, dtype);
          made.reduce_op = reduce_op;
          made.factor = r - 1.5;
          made.recvs = std::move(pieces);
          rank.run(std::move(made));
        };
        const Path path = nbytes <= kInlineBytes ? Path::inlined : Path::staged;
        const Bytes input = reference::sample(dtype, nbytes / item, my_seed);
        Bytes whole = input;
        run({{whole.data(), nbytes / item}});

        Pieces cut(input, item, my_seed + 1);
        run(cut.pieces());
        check_path(rank, path);
        results[static_cast<std::size_t>(r)] = cut.whole();
        CHECK(reference::same(dtype, cut.whole(), whole));

        if (r > 0) {
          cut = Pieces(input, item, my_seed + 2);
          run(cut.pieces());
          CHECK(reference::same(dtype, cut.whole(), whole));
        } else {
          std::copy(input.begin(), input.end(), registered);
          run({{registered, nbytes / item}});
          CHECK(reference::same(dtype, Bytes(registered, registered + nbytes), whole));
        }
        check_path(rank, size == 1 && path == Path::staged ? Path::zero_copy : path);
      });
      for (const Bytes& result : results) CHECK(result == results[0]);
    };
    for (const Reduction& reduction : kReductions) {
      const std::size_t item = itemsize(reduction.dtype);
      for (std::size_t nbytes : {std::size_t{0}, 5 * item, kInlineBytes, kInlineBytes + item,
                                 kSlotBytes, kSlotBytes + item, 5 * kSlotBytes - item}) {
        check(reduction, nbytes);
      }
    }
  }
}

TEST(wide_elements_and_tiny_staging_areas) {
  for (std::size_t staging : {std::size_t{0}, std::size_t{5000}}) {
    World world(4, staging);
    const std::size_t count = 2500;  // of 16 bytes
    std::vector<Bytes> inputs;
    for (std::uint32_t r = 0; r < 4; ++r) {
      inputs.push_back(reference::sample(DType::complex128, count, r));
    }
    const Bytes expected = reference::reduce(DType::complex128, ReduceOp::sum, inputs, {});
    world.each([&](int r, Rank& rank) {
      Bytes buffer = inputs[static_cast<std::size_t>(r)];
      rank.run(ranks::in_place(Op::all_reduce, DType::complex128, {buffer.data(), count}));
      CHECK(reference::same(DType::complex128, buffer, expected));
    });
  }
}
