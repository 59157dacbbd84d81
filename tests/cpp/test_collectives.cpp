// Every collective, on every path, for one to four ranks, against what each element must be. Under
// ThreadSanitizer this is also a proof of the synchronization: see shared_mappings.cpp.
#include <numeric>
#include <random>

#include "check.hpp"
#include "collectives/collectives.hpp"
#include "ranks.hpp"
#include "reference.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using reference::Bytes;

namespace {
// 33 000 bytes no longer travel with the announcement; a slot of the test's segments holds 16 KiB.
constexpr std::size_t kCounts[] = {0, 1, 7, 1000, 8191, 8193, 30011};
constexpr int kMostRanks = 4;

// Element i of what rank r puts in for rank `to` (or all).
std::int32_t value(int r, int to, std::size_t i) {
  return static_cast<std::int32_t>(1000003u * static_cast<unsigned>(r + 1) +
                                   7919u * static_cast<unsigned>(to) +
                                   31u * static_cast<unsigned>(i));
}
using Ints = std::vector<std::int32_t>;

Ints data(int r, int to, std::size_t count) {
  Ints all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = value(r, to, i);
  return all;
}

Ints sum(int world, int to, std::size_t count) {
  Ints all(count);
  for (int r = 0; r < world; ++r) {
    for (std::size_t i = 0; i < count; ++i) {
      all[i] = static_cast<std::int32_t>(static_cast<unsigned>(all[i]) +
                                         static_cast<unsigned>(value(r, to, i)));
    }
  }
  return all;
}

Request request(Op op, int root = -1) {
  Request made = ranks::request(op, DType::int32);
  made.root = root;
  return made;
}

template <class Body>  // body(world, count); the world's ranks go through all counts
void for_all_sizes(Body&& body) {
  for (int size = 1; size <= kMostRanks; ++size) {
    World world(size);
    for (std::size_t count : kCounts) body(world, count);
  }
}

Path expected_path(std::size_t shown_elements) {
  return shown_elements * sizeof(std::int32_t) <= kInlineBytes ? Path::inlined : Path::staged;
}

void check_path(Rank& rank, Path expected) {
  CHECK_EQ(name(rank.communicator->last_path()), name(expected));
}
}  // namespace

TEST(all_reduce_sums_in_place) {
  for_all_sizes([](World& world, std::size_t count) {
    const Ints expected = sum(world.size(), 0, count);
    world.each([&](int r, Rank& rank) {
      Ints buffer = data(r, 0, count);
      rank.run(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer)));
      CHECK(buffer == expected);
      check_path(rank, expected_path(count));
    });
  });
}

TEST(reduce_changes_the_root_only) {
  for_all_sizes([](World& world, std::size_t count) {
    const Ints expected = sum(world.size(), 0, count);
    for (int root = 0; root < world.size(); ++root) {
      world.each([&](int r, Rank& rank) {
        Ints buffer = data(r, 0, count);
        rank.run(ranks::in_place(Op::reduce, DType::int32, ranks::piece(buffer), root));
        CHECK(buffer == (r == root ? expected : data(r, 0, count)));
      });
    }
  });
}

TEST(broadcast_copies_the_root) {
  for_all_sizes([](World& world, std::size_t count) {
    for (int root = 0; root < world.size(); ++root) {
      world.each([&](int r, Rank& rank) {
        Ints buffer = data(r, 0, count);
        rank.run(ranks::in_place(Op::broadcast, DType::int32, ranks::piece(buffer), root));
        CHECK(buffer == data(root, 0, count));
      });
    }
  });
}

TEST(all_gather_collects_pieces_of_different_lengths) {
  for_all_sizes([](World& world, std::size_t count) {
    const auto length = [&](int r) { return count * static_cast<std::size_t>(r) / 2; };
    world.each([&](int r, Rank& rank) {
      Ints mine = data(r, 0, length(r));
      std::vector<Ints> outputs;
      Request made = request(Op::all_gather);
      made.sends = {ranks::piece(mine)};
      for (int s = 0; s < world.size(); ++s) outputs.emplace_back(length(s), -1);
      for (Ints& output : outputs) made.recvs.push_back(ranks::piece(output));
      rank.run(std::move(made));
      for (int s = 0; s < world.size(); ++s) {
        CHECK(outputs[static_cast<std::size_t>(s)] == data(s, 0, length(s)));
      }
      CHECK(mine == data(r, 0, length(r)));
    });
  });
}

TEST(all_gather_and_reduce_scatter_in_place) {
  for_all_sizes([](World& world, std::size_t count) {
    const auto slice = [&](Ints& whole, int r) {
      return Piece{reinterpret_cast<std::byte*>(whole.data() + static_cast<std::size_t>(r) * count),
                   count};
    };
    world.each([&](int r, Rank& rank) {
      const auto length = static_cast<std::size_t>(world.size()) * count;
      Ints whole(length, -1);
      const Ints mine = data(r, 0, count);
      std::copy(mine.begin(), mine.end(), whole.begin() + static_cast<std::ptrdiff_t>(count) * r);
      Request gather = request(Op::all_gather);
      gather.sends = {slice(whole, r)};
      for (int s = 0; s < world.size(); ++s) gather.recvs.push_back(slice(whole, s));
      rank.run(gather);
      for (int s = 0; s < world.size(); ++s) {
        const Ints theirs = data(s, 0, count);
        CHECK(std::equal(theirs.begin(), theirs.end(),
                         whole.begin() + static_cast<std::ptrdiff_t>(count) * s));
      }
      Request scatter = request(Op::reduce_scatter);  // all ranks hold the same now
      scatter.sends = gather.recvs;
      scatter.recvs = gather.sends;
      rank.run(scatter);
      for (std::size_t i = 0; i < count; ++i) {
        const auto factor = static_cast<unsigned>(world.size());
        const auto expected = static_cast<unsigned>(value(r, 0, i)) * factor;
        CHECK_EQ(whole[static_cast<std::size_t>(r) * count + i],
                 static_cast<std::int32_t>(expected));
      }
    });
  });
}

TEST(gather_collects_at_the_root) {
  for_all_sizes([](World& world, std::size_t count) {
    const int root = world.size() - 1;
    world.each([&](int r, Rank& rank) {
      Ints mine = data(r, 0, count);
      std::vector<Ints> outputs(r == root ? static_cast<std::size_t>(world.size()) : 0,
                                Ints(count));
      Request made = request(Op::gather, root);
      made.sends = {ranks::piece(mine)};
      for (Ints& output : outputs) made.recvs.push_back(ranks::piece(output));
      rank.run(std::move(made));
      for (std::size_t s = 0; s < outputs.size(); ++s) {
        CHECK(outputs[s] == data(static_cast<int>(s), 0, count));
      }
    });
  });
}

TEST(scatter_hands_out_pieces_of_different_lengths) {
  for_all_sizes([](World& world, std::size_t count) {
    const auto length = [&](int r) { return count * static_cast<std::size_t>(r + 1) / 2; };
    for (int root = 0; root < world.size(); ++root) {
      world.each([&](int r, Rank& rank) {
        std::vector<Ints> inputs;
        for (int to = 0; r == root && to < world.size(); ++to) {
          inputs.push_back(data(root, to, length(to)));
        }
        Ints output(length(r));
        Request made = request(Op::scatter, root);
        for (Ints& input : inputs) made.sends.push_back(ranks::piece(input));
        made.recvs = {ranks::piece(output)};
        rank.run(std::move(made));
        CHECK(output == data(root, r, length(r)));
      });
    }
  });
}

TEST(reduce_scatter_sums_each_rank_its_piece) {
  for_all_sizes([](World& world, std::size_t count) {
    world.each([&](int r, Rank& rank) {
      std::vector<Ints> inputs;
      for (int to = 0; to < world.size(); ++to) inputs.push_back(data(r, to, count));
      Ints output(count);
      Request made = request(Op::reduce_scatter);
      for (Ints& input : inputs) made.sends.push_back(ranks::piece(input));
      made.recvs = {ranks::piece(output)};
      rank.run(std::move(made));
      CHECK(output == sum(world.size(), r, count));
      check_path(rank, expected_path(count * static_cast<std::size_t>(world.size())));
    });
  });
}

TEST(all_to_all_exchanges_pieces_of_different_lengths) {
  for_all_sizes([](World& world, std::size_t count) {
    const auto length = [&](int from, int to) {
      return count * static_cast<std::size_t>((from + 2 * to) % 3) / 2;
    };
    world.each([&](int r, Rank& rank) {
      std::vector<Ints> inputs, outputs;
      for (int s = 0; s < world.size(); ++s) {
        inputs.push_back(data(r, s, length(r, s)));
        outputs.emplace_back(length(s, r));
      }
      Request made = request(Op::all_to_all);
      for (Ints& input : inputs) made.sends.push_back(ranks::piece(input));
      for (Ints& output : outputs) made.recvs.push_back(ranks::piece(output));
      rank.run(std::move(made));
      for (int s = 0; s < world.size(); ++s) {
        CHECK(outputs[static_cast<std::size_t>(s)] == data(s, r, length(s, r)));
      }
    });
  });
}

TEST(nobody_passes_a_barrier_before_all_have_come) {
  for (int size = 1; size <= kMostRanks; ++size) {
    World world(size);
    std::atomic<int> arrived{0};
    for (int round = 1; round <= 50; ++round) {
      world.each([&](int, Rank& rank) {
        ++arrived;
        rank.run(request(Op::barrier));
        CHECK(arrived.load() >= round * size);
      });
    }
  }
}

// Small and large payloads of one operation meet: whoever could travel inline must not.
TEST(all_gather_of_a_small_and_a_large_piece) {
  World world(3);
  const std::size_t lengths[] = {5, 20000, 0};
  world.each([&](int r, Rank& rank) {
    Ints mine = data(r, 0, lengths[r]);
    std::vector<Ints> outputs;
    Request made = request(Op::all_gather);
    made.sends = {ranks::piece(mine)};
    for (std::size_t length : lengths) outputs.emplace_back(length);
    for (Ints& output : outputs) made.recvs.push_back(ranks::piece(output));
    rank.run(std::move(made));
    for (int s = 0; s < 3; ++s) {
      CHECK(outputs[static_cast<std::size_t>(s)] == data(s, 0, lengths[s]));
    }
    check_path(rank, Path::staged);
  });
}

// Back to back, without anything that would hide a missing wait between two operations.
TEST(a_long_mixture_of_operations_stays_in_step) {
  constexpr int kRounds = 60;
  World world(3);
  world.each([&](int r, Rank& rank) {
    for (int round = 0; round < kRounds; ++round) {
      const std::size_t count = kCounts[static_cast<std::size_t>(round * 5) % std::size(kCounts)];
      Ints reduced = data(r + round, 0, count);
      rank.run(ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(reduced)));
      for (std::size_t i = 0; i < count; i += 101) {
        unsigned expected = 0;
        for (int s = 0; s < 3; ++s) expected += static_cast<unsigned>(value(s + round, 0, i));
        CHECK_EQ(reduced[i], static_cast<std::int32_t>(expected));
      }
      const int root = round % 3;
      Ints copied = data(r, round, count);
      rank.run(ranks::in_place(Op::broadcast, DType::int32, ranks::piece(copied), root));
      CHECK(copied == data(root, round, count));
    }
  });
}

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

namespace {
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

// 2^32 steps take too long to walk: the counters are set just before the end.
TEST(operations_go_on_when_the_step_counter_wraps) {
  constexpr int kSize = 3;
  constexpr std::uint32_t kStart = 0u - 20;
  ranks::Links links(kSize, ranks::kStagingBytes);
  std::vector<std::unique_ptr<Peers>> peers;
  for (int r = 0; r < kSize; ++r) {
    peers.push_back(std::make_unique<Peers>(links.take(r), ranks::kStagingBytes));
    peers.back()->own().header().step.value = kStart;
  }
  const auto body = [&](int r) {
    Peers& mine = *peers[static_cast<std::size_t>(r)];
    Regions regions(mine);
    const Patience patience{SpinPolicy::background(), {}};
    std::uint32_t step = kStart;
    for (std::uint64_t seq = 1; seq <= 10; ++seq) {
      Ints buffer = data(r, 0, 9001);
      const Request made = ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer));
      const OpSignature nothing;
      Operation op({mine, regions, patience, nothing, now_s()}, made, seq, step);
      all_reduce(op);
      if (buffer != sum(kSize, 0, 9001)) return false;
    }
    return step < 1000;  // it did wrap
  };
  std::vector<std::thread> threads;
  std::vector<int> passed(kSize);
  for (int r = 0; r < kSize; ++r) {
    threads.emplace_back([&, r] { passed[static_cast<std::size_t>(r)] = body(r); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(passed == std::vector<int>(kSize, 1));
}

TEST(buffers_that_start_anywhere) {
  World world(2);
  for (std::size_t count : {50, 20000}) {
    world.each([&](int r, Rank& rank) {
      const Ints mine = data(r, 0, count);
      Bytes memory(count * 4 + 1);
      if (count > 0) std::memcpy(memory.data() + 1, mine.data(), count * 4);
      rank.run(ranks::in_place(Op::all_reduce, DType::int32, {memory.data() + 1, count}));
      CHECK(std::memcmp(memory.data() + 1, sum(2, 0, count).data(), count * 4) == 0);
    });
  }
}
