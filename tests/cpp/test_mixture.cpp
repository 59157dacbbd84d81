// Long random programs, the same on all ranks: every operation, any size, waiting at once or later,
// registered memory or not, messages beside them. Whatever is missing between two operations shows
// here, as a wrong number or as a race.
#include <random>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using Longs = std::vector<std::int64_t>;

namespace {
struct Step {
  Op op;
  std::size_t count;
  int root;
  bool later;       // do not wait for it before the next step
  bool registered;  // all_reduce in shared memory
  std::int64_t salt;
};

std::vector<Step> program(std::uint32_t seed, int world, int length) {
  std::mt19937 random(seed);
  std::vector<Step> steps;
  for (int i = 0; i < length; ++i) {
    Step step{};
    step.op = static_cast<Op>(random() % (static_cast<unsigned>(Op::barrier) + 1));
    step.count = random() % 3 == 0 ? 3000 + random() % 9000 : random() % 300;
    step.root = static_cast<int>(random() % static_cast<unsigned>(world));
    step.later = random() % 3 == 0;
    step.registered = random() % 2 == 0;
    step.salt = static_cast<std::int64_t>(random() % 1000);
    steps.push_back(step);
  }
  return steps;
}

std::int64_t value(const Step& step, int from, int to, std::size_t i) {
  return step.salt + 17 * from + 1000 * to + static_cast<std::int64_t>(i % 97);
}

Longs data(const Step& step, int from, int to) {
  Longs all(step.count);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = value(step, from, to, i);
  return all;
}

Longs sum(const Step& step, int world, int to) {
  Longs all(step.count);
  for (int r = 0; r < world; ++r) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += value(step, r, to, i);
  }
  return all;
}

// One operation of one rank: its buffers, and what they must hold in the end.
class Running {
 public:
  Running(const Step& step, int rank, int world) : step_(step), rank_(rank), world_(world) {}

  Request request(std::byte* shared) {
    Request made = ranks::request(step_.op, DType::int64);
    made.root = step_.root;
    const bool at_root = rank_ == step_.root;
    switch (step_.op) {
      case Op::all_reduce:
        shared_ = step_.registered ? shared : nullptr;
        take(1, [&](int) { return sum(step_, world_, 0); });
        outputs_[0] = data(step_, rank_, 0);
        break;
      case Op::reduce:
        take(1, [&](int) { return at_root ? sum(step_, world_, 0) : data(step_, rank_, 0); });
        outputs_[0] = data(step_, rank_, 0);
        break;
      case Op::broadcast:
        take(1, [&](int) { return data(step_, step_.root, 0); });
        outputs_[0] = data(step_, rank_, 0);
        break;
      case Op::all_gather:
      case Op::gather:
        give(1);
        take(step_.op == Op::all_gather || at_root ? world_ : 0,
             [&](int from) { return data(step_, from, 0); });
        break;
      case Op::reduce_scatter:
        give(world_);
        take(1, [&](int) { return sum(step_, world_, rank_); });
        break;
      case Op::scatter:
        give(at_root ? world_ : 0);
        take(1, [&](int) { return data(step_, step_.root, rank_); });
        break;
      case Op::all_to_all:
        give(world_);
        take(world_, [&](int from) { return data(step_, from, rank_); });
        break;
      default:
        break;
    }
    for (Longs& input : inputs_) made.sends.push_back(ranks::piece(input));
    for (Longs& output : outputs_) made.recvs.push_back(ranks::piece(output));
    if (shared_ != nullptr) {
      std::copy(outputs_[0].begin(), outputs_[0].end(), reinterpret_cast<std::int64_t*>(shared_));
      made.recvs[0].data = shared_;
    } else if (step_.op == Op::all_reduce) {  // in two pieces, on each rank cut elsewhere
      Piece& first = made.recvs[0];
      const std::size_t n = step_.count * static_cast<std::size_t>(rank_ + 1) / 10;
      const Piece second{first.data + n * sizeof(std::int64_t), first.count - n};
      first.count = n;
      made.recvs.push_back(second);
    }
    return made;
  }
  void check() {
    if (shared_ != nullptr) {
      const auto* begin = reinterpret_cast<const std::int64_t*>(shared_);
      outputs_[0].assign(begin, begin + step_.count);
    }
    CHECK(outputs_ == expected_);
  }

 private:
  void give(int n) {
    for (int to = 0; to < n; ++to) inputs_.push_back(data(step_, rank_, to));
  }
  template <class Expected>
  void take(int n, Expected&& expected) {
    outputs_.resize(static_cast<std::size_t>(n), Longs(step_.count));
    for (int from = 0; from < n; ++from) expected_.push_back(expected(from));
  }

  Step step_;
  int rank_, world_;
  std::byte* shared_ = nullptr;
  std::vector<Longs> inputs_, outputs_, expected_;
};

// A message to the next rank between the collectives, now and then.
void pass_on(Rank& rank, int r, int world, const Step& step) {
  Longs mine = data(step, r, 0), theirs(step.count);
  const int next = (r + 1) % world, previous = (r + world - 1) % world;
  const auto got = rank.post(ranks::recv(DType::int64, ranks::piece(theirs), previous));
  ranks::expect_done(*rank.post(ranks::send(DType::int64, ranks::piece(mine), next)));
  ranks::expect_done(*got);
  CHECK(theirs == data(step, previous, 0));
}

void play(const std::vector<Step>& steps, int r, Rank& rank, int world) {
  // Two operations never use it at the same time.
  const auto shared = rank.communicator->allocate(12'000 * sizeof(std::int64_t));
  std::vector<std::pair<std::unique_ptr<Running>, std::shared_ptr<Work>>> pending;
  const auto settle = [&] {
    for (auto& [running, work] : pending) {
      ranks::expect_done(*work);
      running->check();
    }
    pending.clear();
  };
  for (const Step& step : steps) {
    auto running = std::make_unique<Running>(step, r, world);
    const bool shares = step.op == Op::all_reduce && step.registered;
    if (shares) settle();
    Request request = running->request(shared.data);
    if (step.later) {
      auto work = rank.submit(std::move(request));
      pending.emplace_back(std::move(running), std::move(work));
    } else {
      rank.run(std::move(request));
      running->check();
    }
    if (world > 1 && step.salt % 5 == 0) pass_on(rank, r, world, step);
  }
  settle();
}
}  // namespace

TEST(random_programs) {
  for (int size = 1; size <= 4; ++size) {
    for (std::uint32_t seed = 0; seed < 4; ++seed) {
      World world(size);
      const auto steps = program(seed * 10 + static_cast<std::uint32_t>(size), size, 60);
      world.each([&](int r, Rank& rank) { play(steps, r, rank, size); });
    }
  }
}

TEST(many_more_ranks_than_cores) {
  constexpr int kRanks = 9;
  World world(kRanks);
  const auto steps = program(99, kRanks, 25);
  world.each([&](int r, Rank& rank) { play(steps, r, rank, kRanks); });
}

TEST(any_way_to_wait) {
  for (int spin_us : {0, 1, 1000}) {
    World world(3, ranks::kStagingBytes, spin_us);
    const auto steps = program(7, 3, 30);
    world.each([&](int r, Rank& rank) { play(steps, r, rank, 3); });
  }
}
