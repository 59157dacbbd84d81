// The tree over the ranks, made visible, and that results do not depend on how the work is cut.
#include "check.hpp"
#include "reduction_tree.hpp"
#include "reference.hpp"

using namespace sdp;

namespace {
// A made-up operation that records its tree: every source is a one-byte index into a table of
// texts, and folding two of them enters "(a b)". The state belongs to the running test.
struct Tree {
  std::vector<std::string> texts;
};
thread_local Tree* recording = nullptr;

void join(void* out, const void* a, const void* b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const auto text = [&](const void* from) {
      return recording->texts[static_cast<const std::uint8_t*>(from)[i]];
    };
    std::string joined = "(";
    joined.append(text(a)).append(" ").append(text(b)).append(")");
    recording->texts.push_back(joined);
    static_cast<std::uint8_t*>(out)[i] = static_cast<std::uint8_t>(recording->texts.size() - 1);
  }
}

Kernel tree_kernel(DType, ReduceOp) {
  Kernel kernel;
  kernel.accumulator_size = 1;
  kernel.load = [](void* out, const void* in, std::size_t n, double) { std::memcpy(out, in, n); };
  kernel.fold = join;
  kernel.store = [](void* out, const void* in, std::size_t n, int) { std::memcpy(out, in, n); };
  kernel.join = [](void* out, const void* a, const void* b, std::size_t n, int) {
    join(out, a, b, n);
  };
  return kernel;
}

std::string tree_over(std::size_t n_sources) {
  Tree tree;
  std::vector<std::uint8_t> indices(n_sources);
  std::vector<const std::byte*> sources;
  for (std::size_t s = 0; s < n_sources; ++s) {
    tree.texts.push_back(std::to_string(s));
    indices[s] = static_cast<std::uint8_t>(s);
    sources.push_back(reinterpret_cast<const std::byte*>(&indices[s]));
  }
  std::byte result{};
  std::byte* const output = &result;
  recording = &tree;
  Reducer(DType::uint8, ReduceOp::sum, {}, tree_kernel).run(sources, {&output, 1}, 1);
  recording = nullptr;
  return tree.texts[static_cast<std::size_t>(result)];
}

// Elements [begin, begin + count) of all sources, cut into pieces of `step`.
reference::Bytes reduce_in_steps(DType dtype, ReduceOp op,
                                 const std::vector<reference::Bytes>& data, std::size_t step) {
  const std::size_t item = itemsize(dtype);
  reference::Bytes result(data[0].size());
  Reducer reducer(dtype, op);
  const std::size_t count = result.size() / item;
  for (std::size_t at = 0; at < count; at += step) {
    std::vector<const std::byte*> sources;
    for (const auto& source : data) sources.push_back(source.data() + at * item);
    std::byte* const output = result.data() + at * item;
    reducer.run(sources, {&output, 1}, std::min(step, count - at));
  }
  return result;
}
}  // namespace

TEST(one_fixed_tree_for_each_number_of_ranks) {
  CHECK_EQ(tree_over(1), "0");
  CHECK_EQ(tree_over(2), "(0 1)");
  CHECK_EQ(tree_over(3), "((0 1) 2)");
  CHECK_EQ(tree_over(4), "((0 1) (2 3))");
  CHECK_EQ(tree_over(5), "(((0 1) (2 3)) 4)");
  CHECK_EQ(tree_over(6), "(((0 1) (2 3)) (4 5))");
  CHECK_EQ(tree_over(7), "(((0 1) (2 3)) ((4 5) 6))");
  CHECK_EQ(tree_over(8), "(((0 1) (2 3)) ((4 5) (6 7)))");
  CHECK_EQ(tree_over(9), "((((0 1) (2 3)) ((4 5) (6 7))) 8)");
}

TEST(the_tree_of_a_node_is_a_subtree_of_the_whole) {
  // Two nodes of four: what each node sums by itself is a half of the tree over all eight.
  const std::string node = tree_over(4);
  const std::string both = "(" + node + " ((4 5) (6 7)))";
  CHECK_EQ(tree_over(8), both);
}

TEST(cutting_the_work_does_not_change_a_bit) {
  const std::size_t count = 5000;
  for (DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::complex64}) {
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product}) {
      std::vector<reference::Bytes> data;
      for (std::uint32_t s = 0; s < 5; ++s) data.push_back(reference::sample(dtype, count, s));
      const auto whole = reduce_in_steps(dtype, op, data, count);
      for (std::size_t step : {1, 3, 8, 31, 1000, 4096}) {
        CHECK(reference::same(dtype, reduce_in_steps(dtype, op, data, step), whole));
      }
    }
  }
}

TEST(sixteen_bit_floats_are_rounded_once) {
  // 2048 + 1 + 1: in float16, 2048 + 1 is 2048 again; in float32 the sum is 2050.
  const std::uint16_t large = reference::encode(reference::kFloat16, 2048);
  const std::uint16_t one = reference::encode(reference::kFloat16, 1);
  const std::vector<std::uint16_t> values{large, one, one};
  std::vector<const std::byte*> sources;
  for (const auto& value : values) sources.push_back(reinterpret_cast<const std::byte*>(&value));
  std::uint16_t result = 0;
  auto* const output = reinterpret_cast<std::byte*>(&result);
  Reducer(DType::float16, ReduceOp::sum).run(sources, {&output, 1}, 1);
  CHECK_EQ(reference::decode(reference::kFloat16, result), 2050.0);
}

TEST(no_elements_need_no_memory) {
  const std::byte* const sources[] = {nullptr, nullptr};
  std::byte* const output = nullptr;
  Reducer(DType::float32, ReduceOp::sum).run(sources, {&output, 1}, 0);
}
