// Balanced fusion buffers: gradients in, sums out, step after step, whatever the order.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "check.hpp"
#include "fusion.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;

namespace {
using Specs = std::vector<TensorSpec>;

// Whole numbers, so that sums and averages are exact in every type and order.
double value(int rank, int step, std::size_t tensor, std::size_t i) {
  return static_cast<double>(
      (static_cast<std::size_t>(rank) * 3 + static_cast<std::size_t>(step) + tensor * 5 + i) % 7);
}

void put(std::byte* at, DType dtype, double number) {
  const auto write = [&](auto converted) { std::memcpy(at, &converted, sizeof converted); };
  switch (dtype) {
    case DType::float64:
      return write(number);
    case DType::int32:
      return write(static_cast<std::int32_t>(number));
    default:
      return write(static_cast<float>(number));
  }
}

double get(const std::byte* at, DType dtype) {
  const auto read = [&](auto stored) {
    std::memcpy(&stored, at, sizeof stored);
    return static_cast<double>(stored);
  };
  switch (dtype) {
    case DType::float64:
      return read(double{});
    case DType::int32:
      return read(std::int32_t{});
    default:
      return read(float{});
  }
}

// The gradients of one rank.
class Gradients {
 public:
  explicit Gradients(const Specs& specs) : specs_(specs) {
    for (const auto& spec : specs) memory_.emplace_back(spec.count * itemsize(spec.dtype));
  }
  void fill(int rank, int step) {
    for (std::size_t t = 0; t < specs_.size(); ++t) {
      for (std::size_t i = 0; i < specs_[t].count; ++i) {
        put(at(t, i), specs_[t].dtype, value(rank, step, t, i));
      }
    }
  }
  std::byte* data(std::size_t tensor) { return memory_[tensor].data(); }

  // Is element i of tensor t what `expected(t, i)` says?
  template <class Expected>
  void check(Expected&& expected) {
    for (std::size_t t = 0; t < specs_.size(); ++t) {
      for (std::size_t i = 0; i < specs_[t].count; ++i) {
        CHECK_EQ(get(at(t, i), specs_[t].dtype), expected(t, i));
      }
    }
  }

 private:
  std::byte* at(std::size_t tensor, std::size_t i) {
    return memory_[tensor].data() + i * itemsize(specs_[tensor].dtype);
  }
  const Specs& specs_;
  std::vector<std::vector<std::byte>> memory_;
};

FusionBuffer make(Rank& rank, const Specs& specs, std::size_t threshold,
                  ReduceOp op = ReduceOp::sum, double timeout_s = ranks::kTimeoutS) {
  return FusionBuffer(rank.communicator, FusionBuffer::to(rank.engine), specs,
                      {threshold, op, timeout_s});
}

double sum(int world, int step, std::size_t tensor, std::size_t i) {
  double total = 0;
  for (int r = 0; r < world; ++r) total += value(r, step, tensor, i);
  return total;
}

std::vector<std::size_t> shuffled(std::size_t n, std::uint32_t seed) {
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

Specs random_model(std::uint32_t seed) {
  std::mt19937 random(seed);
  const DType types[] = {DType::float32, DType::float64, DType::int32};
  Specs specs;
  for (int t = 0; t < 40; ++t) {
    const std::size_t most = random() % 6 == 0 ? 20'000 : 900;
    specs.push_back({random() % 8 == 0 ? 0 : random() % most, types[random() % 3]});
  }
  return specs;
}

void nothing() {}
}  // namespace

TEST(sums_of_random_models_in_any_order_step_after_step) {
  for (int size = 1; size <= 3; ++size) {
    for (std::size_t threshold :
         {std::size_t{128}, std::size_t{4096}, std::size_t{65'536}, std::size_t{25} << 20}) {
      const Specs specs = random_model(static_cast<std::uint32_t>(threshold));
      World world(size);
      world.each([&](int r, Rank& rank) {
        Gradients gradients(specs);
        FusionBuffer buffer = make(rank, specs, threshold);
        for (int step = 0; step < 3; ++step) {
          gradients.fill(r, step);
          const auto order = shuffled(specs.size(), static_cast<std::uint32_t>(r * 10 + step));
          for (std::size_t tensor : order) buffer.ready(tensor, gradients.data(tensor));
          buffer.finish(nothing);
          gradients.check([&](std::size_t t, std::size_t i) { return sum(size, step, t, i); });
        }
      });
    }
  }
}

TEST(averages_divide_by_the_number_of_ranks) {
  const Specs specs{{1000, DType::float32}, {1000, DType::float64}, {20'000, DType::float32}};
  World world(2);
  world.each([&](int r, Rank& rank) {
    Gradients gradients(specs);
    FusionBuffer buffer = make(rank, specs, 65'536, ReduceOp::avg);
    gradients.fill(r, 0);
    for (std::size_t t = specs.size(); t-- > 0;) buffer.ready(t, gradients.data(t));
    buffer.finish(nothing);
    gradients.check([&](std::size_t t, std::size_t i) { return sum(2, 0, t, i) / 2; });
  });
}

// A rank that has no gradient for a tensor adds nothing, and its own memory is left alone.
TEST(tensors_that_are_never_ready_count_as_zeros) {
  const Specs specs{{500, DType::float32},    {0, DType::float32},  {700, DType::float32},
                    {30'000, DType::float32}, {40, DType::float64}, {30'000, DType::float32}};
  for (std::size_t threshold : {4096, 1 << 20}) {
    World world(2);
    world.each([&](int r, Rank& rank) {
      Gradients gradients(specs);
      FusionBuffer buffer = make(rank, specs, threshold);
      for (int step = 0; step < 4; ++step) {
        gradients.fill(r, step);
        const auto has = [&](int who, std::size_t t) {
          return (static_cast<int>(t) + step) % 3 != who;
        };
        for (std::size_t t = 0; t < specs.size(); ++t) {
          if (has(r, t)) buffer.ready(t, gradients.data(t));
        }
        buffer.finish(nothing);
        gradients.check([&](std::size_t t, std::size_t i) {
          if (!has(r, t)) return value(r, step, t, i);
          return (has(0, t) ? value(0, step, t, i) : 0) + (has(1, t) ? value(1, step, t, i) : 0);
        });
      }
      buffer.finish(nothing);  // a step without any gradient
    });
  }
}

// Frameworks give no address to what has no elements.
TEST(tensors_without_elements_or_memory) {
  for (const Specs& specs : {Specs{{0, DType::float32}, {10, DType::float32}, {0, DType::int32}},
                             Specs{{0, DType::float64}, {0, DType::float32}}, Specs{}}) {
    World world(2);
    world.each([&](int r, Rank& rank) {
      Gradients gradients(specs);
      FusionBuffer buffer = make(rank, specs, 128);
      for (int step = 0; step < 2; ++step) {
        gradients.fill(r, step);
        for (std::size_t t = 0; t < specs.size(); ++t) {
          buffer.ready(t, specs[t].count == 0 ? nullptr : gradients.data(t));
          CHECK_THROWS(buffer.ready(t, gradients.data(t)), std::invalid_argument, "second time");
        }
        buffer.finish(nothing);
        gradients.check([&](std::size_t t, std::size_t i) { return sum(2, step, t, i); });
      }
    });
  }
}

TEST(several_threads_may_yield_gradients) {
  const Specs specs = random_model(3);
  World world(2);
  world.each([&](int r, Rank& rank) {
    Gradients gradients(specs);
    FusionBuffer buffer = make(rank, specs, 4096);
    for (int step = 0; step < 5; ++step) {
      gradients.fill(r, step);
      const auto half = [&](std::size_t odd) {
        for (std::size_t t = odd; t < specs.size(); t += 2) buffer.ready(t, gradients.data(t));
      };
      std::thread other(half, 1);
      half(0);
      other.join();
      buffer.finish(nothing);
      gradients.check([&](std::size_t t, std::size_t i) { return sum(2, step, t, i); });
    }
  });
}

TEST(buffers_leave_while_later_ones_fill) {
  const Specs specs(10, {1000, DType::float32});
  World world(2);
  world.each([&](int r, Rank& rank) {
    Gradients gradients(specs);
    FusionBuffer buffer = make(rank, specs, 4096);
    gradients.fill(r, 0);
    CHECK_EQ(buffer.plan().buckets().size(), 10);
    for (std::size_t t = 0; t < 5; ++t) buffer.ready(t, gradients.data(t));
    // Behind the first five buckets, but before the others are even ready.
    rank.run(ranks::request(Op::barrier, DType::uint8));
    for (std::size_t t = 0; t < 5; ++t) {
      float first;
      std::memcpy(&first, gradients.data(t), sizeof first);
      CHECK_EQ(first, sum(2, 0, t, 0));
    }
    for (std::size_t t = 5; t < 10; ++t) buffer.ready(t, gradients.data(t));
    buffer.finish(nothing);
    gradients.check([&](std::size_t t, std::size_t i) { return sum(2, 0, t, i); });
  });
}

// Any number of buffers is in flight, however late the others are.
TEST(ready_waits_for_nobody) {
  const Specs specs(50, {1000, DType::float32});
  World world(2);
  std::atomic<bool> all_ready{false};
  world.each([&](int r, Rank& rank) {
    Gradients gradients(specs);
    FusionBuffer buffer = make(rank, specs, 4096);
    gradients.fill(r, 0);
    while (r == 1 && !all_ready.load()) std::this_thread::yield();
    for (std::size_t t = 0; t < specs.size(); ++t) buffer.ready(t, gradients.data(t));
    all_ready = true;
    buffer.finish(nothing);
    gradients.check([&](std::size_t t, std::size_t i) { return sum(2, 0, t, i); });
  });
}

// Tensors in registered memory, apart from each other, elsewhere on each rank. A fusion buffer of
// them is reduced in place, unless one tensor lies elsewhere on one rank, or was not ready.
TEST(registered_tensors_are_reduced_in_place) {
  enum class Case { all_registered, one_elsewhere, one_absent };
  constexpr std::size_t kTensors = 3, kCount = 5'000, kBytes = kCount * 4;
  World world(2);
  world.each([&](int r, Rank& rank) {
    std::byte* const registered = rank.communicator->allocate((kTensors + 1) * 2 * kBytes).data;
    const Specs specs(kTensors, {kCount, DType::float32});
    FusionBuffer buffer = make(rank, specs, 131'072);
    CHECK_EQ(buffer.plan().buckets().size(), 1);
    for (const Case which : {Case::all_registered, Case::one_elsewhere, Case::one_absent}) {
      Gradients gradients(specs);
      gradients.fill(r, 0);
      const std::size_t ready = which == Case::one_absent ? kTensors - 1 : kTensors;
      std::vector<std::byte*> places;
      for (std::size_t t = 0; t < ready; ++t) {
        places.push_back(registered + (2 * t + static_cast<std::size_t>(r)) * kBytes);
        if (which == Case::one_elsewhere && r == 1 && t == 1) places[t] = gradients.data(t);
        std::memmove(places[t], gradients.data(t), kBytes);
        buffer.ready(t, places[t]);
      }
      buffer.finish(nothing);
      CHECK(rank.communicator->last_path() ==
            (which == Case::all_registered ? Path::zero_copy : Path::staged));
      for (std::size_t t = 0; t < ready; ++t) {
        std::memmove(gradients.data(t), places[t], kBytes);
      }
      gradients.check([&](std::size_t t, std::size_t i) {
        return t < ready ? sum(2, 0, t, i) : value(r, 0, t, i);
      });
    }
  });
}

TEST(misuse_is_named_and_harmless) {
  const Specs specs{{10, DType::float32}, {10, DType::float32}};
  World world(2);
  world.each([&](int r, Rank& rank) {
    CHECK_THROWS(make(rank, specs, 100), std::invalid_argument, "multiple of 128");
    CHECK_THROWS(make(rank, {{4, DType::boolean}}, 128, ReduceOp::avg), std::invalid_argument,
                 "'avg' is not defined for bool");
    Gradients gradients(specs);
    gradients.fill(r, 0);
    FusionBuffer buffer = make(rank, specs, 128);
    CHECK_THROWS(buffer.ready(2, gradients.data(0)), std::invalid_argument, "no tensor 2");
    CHECK_THROWS(buffer.ready(0, nullptr), std::invalid_argument, "tensor 0 has no memory");
    buffer.ready(0, gradients.data(0));
    CHECK_THROWS(buffer.ready(0, gradients.data(0)), std::invalid_argument,
                 "tensor 0 is ready a second time before finish()");
    buffer.ready(1, gradients.data(1));
    buffer.finish(nothing);
    gradients.check([&](std::size_t t, std::size_t i) { return sum(2, 0, t, i); });
  });
}

TEST(ranks_with_other_tensors_are_told_before_anything_is_added_up) {
  World world(2);
  const auto failures = world.failures([&](int r, Rank& rank) {
    // As many bytes on both ranks.
    const Specs specs = r == 0 ? Specs{{100, DType::float32}, {200, DType::float32}}
                               : Specs{{200, DType::float32}, {100, DType::float32}};
    Gradients gradients(specs);
    gradients.fill(r, 0);
    FusionBuffer buffer = make(rank, specs, 4096);
    for (std::size_t t = 0; t < 2; ++t) buffer.ready(t, gradients.data(t));
    try {
      buffer.finish(nothing);
    } catch (const Failure&) {
      gradients.check([&](std::size_t t, std::size_t i) { return value(r, 0, t, i); });
      throw;
    }
  });
  for (const auto& failure : failures) CHECK(failure && failure->kind == FailureKind::mismatch);
}

TEST(a_failure_comes_out_of_finish_and_stays) {
  const Specs specs(6, {2000, DType::float32});
  World world(2);
  const auto failures = world.failures([&](int r, Rank& rank) {
    Gradients gradients(specs);
    FusionBuffer buffer = make(rank, specs, 8192, ReduceOp::sum, 0.3);
    for (std::size_t t = 0; t < 3; ++t) buffer.ready(t, gradients.data(t));
    if (r == 1) {
      for (std::size_t t = 0; t < 3; ++t) rank.run(ranks::request(Op::barrier, DType::uint8));
    }
    buffer.finish(nothing);
  });
  for (const auto& failure : failures) CHECK(failure.has_value());
  CHECK_THROWS(world[0].communicator->throw_if_failed(), Failure, "");
}

TEST(an_interrupted_finish_names_the_operation_and_the_remedy) {
  const Specs specs(1, {2000, DType::float32});
  World world(2);
  Gradients gradients(specs);
  FusionBuffer buffer = make(world[0], specs, 8192);
  buffer.ready(0, gradients.data(0));
  try {
    buffer.finish([] { throw Interrupted{}; });
    CHECK(false);
  } catch (const Interrupted&) {
  }
  CHECK_THROWS(world[0].communicator->throw_if_failed(), Failure,
               "[rank 0/2] all_reduce float32[2000] sum: interrupted by a signal. Hint: the ranks");
}

TEST(a_buffer_dropped_in_the_middle_of_a_step_waits_for_nobody) {
  const Specs specs(3, {2000, DType::float32});
  World world(2);
  Gradients gradients(specs);
  const double start = now_s();
  {
    FusionBuffer buffer = make(world[0], specs, 8192);
    buffer.ready(0, gradients.data(0));
  }
  CHECK(now_s() - start < 1);
  CHECK_THROWS(world[0].communicator->throw_if_failed(), Failure, "dropped");
}
