#include "types.hpp"

#include <array>

namespace sdp {
namespace {
struct DTypeInfo {
  std::string_view name;
  std::size_t itemsize;
};
constexpr std::array<DTypeInfo, kDTypes> kDTypeInfo{{{"float16", 2},
                                                     {"float32", 4},
                                                     {"float64", 8},
                                                     {"bfloat16", 2},
                                                     {"int8", 1},
                                                     {"int16", 2},
                                                     {"int32", 4},
                                                     {"int64", 8},
                                                     {"uint8", 1},
                                                     {"bool", 1},
                                                     {"complex64", 8},
                                                     {"complex128", 16}}};
constexpr std::array<std::string_view, kReduceOps> kReduceNames{
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
constexpr std::array<std::string_view, kOps> kOpNames{
    "all_reduce", "reduce",  "broadcast", "all_gather", "reduce_scatter", "gather", "scatter",
    "all_to_all", "barrier", "send",      "recv"};

// Checks the index: names are also printed for values that a peer wrote into shared memory.
template <class Table, class Value>
auto at(const Table& table, Value value) {
  const auto index = static_cast<std::size_t>(value);
  return index < table.size() ? table[index] : typename Table::value_type{};
}
}  // namespace

std::string_view name(DType dtype) {
  return at(kDTypeInfo, dtype).name;
}
std::string_view name(ReduceOp op) {
  return at(kReduceNames, op);
}
std::string_view name(Op op) {
  return at(kOpNames, op);
}
std::size_t itemsize(DType dtype) {
  return at(kDTypeInfo, dtype).itemsize;
}

bool reduces(Op op) {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

bool counts_must_agree(Op op) {
  return reduces(op) || op == Op::broadcast;
}

bool is_rooted(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
}
}  // namespace sdp
