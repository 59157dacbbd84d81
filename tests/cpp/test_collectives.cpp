// Every collective, on every path, for one to four ranks, against what each element must be. Under
// ThreadSanitizer this is also a proof of the synchronization: see shared_mappings.cpp.
#include <unistd.h>

#include "check.hpp"
#include "collectives/collectives.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;

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
    HelperThreads helpers(1);
    Flight flight(mine.own().flight(), getpid());
    Trace trace;
    std::uint32_t step = kStart;
    for (std::uint64_t seq = 1; seq <= 10; ++seq) {
      Ints buffer = data(r, 0, 9001);
      const Request made = ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffer));
      const OpSignature nothing;
      OperationRecord record(flight, trace, made, seq, nullptr);
      record.begin();
      Operation op({mine, regions, patience, helpers, nothing, record}, made, seq, step);
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
      std::vector<std::byte> memory(count * 4 + 1);
      if (count > 0) std::memcpy(memory.data() + 1, mine.data(), count * 4);
      rank.run(ranks::in_place(Op::all_reduce, DType::int32, {memory.data() + 1, count}));
      CHECK(std::memcmp(memory.data() + 1, sum(2, 0, count).data(), count * 4) == 0);
    });
  }
}
