// Every reduction of every type, in every set of kernels, bit for bit as scalar references have it:
// all tails, any alignment, outputs that are inputs.
#include "check.hpp"
#include "reduction_tree.hpp"
#include "reference.hpp"

using namespace sdp;
using reference::Bytes;

namespace {
template <class Body>  // body(dtype, op)
void for_all_pairs(Body&& body) {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kReduceOps; ++o) body(static_cast<DType>(d), static_cast<ReduceOp>(o));
  }
}

std::string label(const reference::Table& table, DType dtype, ReduceOp op, std::size_t n) {
  return table.name + " " + std::string(name(dtype)) + " " + std::string(name(op)) + "[" +
         std::to_string(n) + "]";
}

// Elements at a chosen distance from alignment, between bytes that must not change.
class Fenced {
 public:
  Fenced(const Bytes& data, std::size_t shift)
      : memory_(kFence + shift + data.size() + kFence, std::byte{0xa5}), begin_(kFence + shift) {
    std::copy(data.begin(), data.end(), memory_.begin() + begin_);
    size_ = data.size();
  }
  std::byte* data() { return memory_.data() + begin_; }
  Bytes content() const {
    const auto begin = memory_.begin() + begin_;
    return {begin, begin + static_cast<std::ptrdiff_t>(size_)};
  }
  bool intact() const {
    const auto changed = [](std::byte b) { return b != std::byte{0xa5}; };
    const auto begin = memory_.begin() + begin_;
    return std::none_of(memory_.begin(), begin, changed) &&
           std::none_of(begin + static_cast<std::ptrdiff_t>(size_), memory_.end(), changed);
  }

 private:
  static constexpr std::size_t kFence = 64;
  Bytes memory_;
  std::ptrdiff_t begin_;
  std::size_t size_ = 0;
};

enum class Output { separate, first_source, last_source, all_sources };

struct Case {
  DType dtype;
  ReduceOp op;
  std::size_t n;
  std::size_t world;
  std::size_t shift = 0;
  Output output = Output::separate;
};

// Long samples of every type, made once: a case takes a part of them.
class Samples {
 public:
  std::vector<Bytes> take(const Case& one) {
    auto& pool = pools_[static_cast<std::size_t>(one.dtype)];
    for (std::size_t s = pool.size(); s < one.world; ++s) {
      pool.push_back(reference::sample(one.dtype, 2 * kMost, static_cast<std::uint32_t>(s)));
    }
    const std::size_t item = itemsize(one.dtype);
    const std::size_t begin = one.n * 131 % kMost * item;
    std::vector<Bytes> taken;
    for (std::size_t s = 0; s < one.world; ++s) {
      taken.emplace_back(pool[s].begin() + static_cast<std::ptrdiff_t>(begin),
                         pool[s].begin() + static_cast<std::ptrdiff_t>(begin + one.n * item));
    }
    return taken;
  }

 private:
  static constexpr std::size_t kMost = 9000;
  std::vector<Bytes> pools_[kDTypes];
};

std::vector<double> factors(std::size_t world) {
  std::vector<double> all{0.5, -3, 1.0 / 3, 1e-3, 0, 7, 0.1, 1e4, 1};
  all.resize(world);
  return all;
}

// What each output holds afterwards.
std::vector<Bytes> run(KernelTable table, const Case& one, const std::vector<Bytes>& data) {
  std::vector<Fenced> buffers;
  for (const Bytes& source : data) buffers.emplace_back(source, one.shift);
  Fenced apart(Bytes(data[0].size()), one.shift);
  std::vector<const std::byte*> sources;
  for (Fenced& buffer : buffers) sources.push_back(buffer.data());
  std::vector<Fenced*> targets;
  if (one.output == Output::separate) targets = {&apart};
  if (one.output == Output::first_source) targets = {&buffers.front()};
  if (one.output == Output::last_source) targets = {&buffers.back(), &apart};
  if (one.output == Output::all_sources) {
    for (Fenced& buffer : buffers) targets.push_back(&buffer);
  }
  std::vector<std::byte*> outputs;
  for (Fenced* target : targets) outputs.push_back(target->data());

  Reducer(one.dtype, one.op, factors(one.world), table).run(sources, outputs, one.n);

  std::vector<Bytes> results;
  for (Fenced* target : targets) results.push_back(target->content());
  for (std::size_t s = 0; s < buffers.size(); ++s) {
    CHECK(buffers[s].intact());
    const bool written = std::count(outputs.begin(), outputs.end(), buffers[s].data()) > 0;
    CHECK(written || buffers[s].content() == data[s]);
  }
  CHECK(apart.intact());
  return results;
}

void check_case(Samples& samples, const Case& one) {
  const auto data = samples.take(one);
  const Bytes expected = reference::reduce(one.dtype, one.op, data, factors(one.world));
  for (const auto& table : reference::tables()) {
    for (const Bytes& result : run(table.kernels, one, data)) {
      // All tables yield the reference's bits, hence each other's.
      if (reference::same(one.dtype, result, expected)) continue;
      check::fail(__FILE__, __LINE__, label(table, one.dtype, one.op, one.n));
    }
  }
}

template <class Body>
void for_all_defined_pairs(Body&& body) {
  for_all_pairs([&](DType dtype, ReduceOp op) {
    if (reference::defined(dtype, op)) body(dtype, op);
  });
}
}  // namespace

TEST(tables_define_the_same_pairs) {
  for (const auto& table : reference::tables()) {
    for_all_pairs([&](DType dtype, ReduceOp op) {
      CHECK_EQ(static_cast<bool>(table.kernels(dtype, op)), reference::defined(dtype, op));
    });
  }
}

TEST(undefined_pairs_name_the_alternatives) {
  const char* of_bool = "'avg' is not defined for bool; it has: sum, product, min, max, band";
  CHECK_THROWS(checked_kernel(DType::boolean, ReduceOp::avg), std::invalid_argument, of_bool);
  CHECK_THROWS(Reducer(DType::complex64, ReduceOp::max), std::invalid_argument,
               "it has: sum, avg, product, premul_sum");
}

TEST(all_tails_of_one_to_three_sources) {
  Samples samples;
  for_all_defined_pairs([&](DType dtype, ReduceOp op) {
    for (std::size_t n = 0; n <= 70; ++n) {
      for (std::size_t world = 1; world <= 3; ++world) check_case(samples, {dtype, op, n, world});
    }
  });
}

TEST(any_alignment) {
  Samples samples;
  for_all_defined_pairs([&](DType dtype, ReduceOp op) {
    for (std::size_t shift = 1; shift <= 17; shift += 4) {
      for (std::size_t n : {1, 7, 33, 70}) {
        check_case(samples, {dtype, op, n, 2, shift});
        check_case(samples, {dtype, op, n, 3, shift});
        check_case(samples, {dtype, op, n, 3, shift, Output::all_sources});
      }
    }
  });
}

TEST(outputs_may_be_sources) {
  Samples samples;
  for_all_defined_pairs([&](DType dtype, ReduceOp op) {
    for (Output output : {Output::first_source, Output::last_source, Output::all_sources}) {
      for (std::size_t world = 1; world <= 5; ++world) {
        for (std::size_t n : {1, 41, 2100}) check_case(samples, {dtype, op, n, world, 0, output});
      }
    }
  });
}

TEST(many_sources_and_several_blocks) {
  Samples samples;
  for_all_defined_pairs([&](DType dtype, ReduceOp op) {
    for (std::size_t world = 4; world <= 9; ++world) check_case(samples, {dtype, op, 37, world});
    for (std::size_t n : {1023, 1024, 1025, 2049, 8193}) check_case(samples, {dtype, op, n, 2});
    check_case(samples, {dtype, op, 9000, 5});
  });
}
