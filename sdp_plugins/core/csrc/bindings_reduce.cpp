#include "bindings.hpp"
#include "reduction_tree.hpp"
#include "streaming_copy.hpp"

namespace sdp {

void bind_reductions(nb::module_& m) {
  m.def("itemsize", &itemsize, "dtype"_a, "Bytes of one element.");
  m.def(
      "supports",
      [](DType dtype, ReduceOp op) { return static_cast<bool>(best_kernels()(dtype, op)); },
      "dtype"_a, "op"_a, "Whether the reduction is defined for the type.");
  m.def("reduces", &reduces, "op"_a, "Whether an operation carries a reduction.");
  m.def("counts_must_agree", &counts_must_agree, "op"_a,
        "Whether all ranks' buffers have one length.");
  m.def(
      "accumulator_size",
      [](DType dtype, ReduceOp op) { return checked_kernel(dtype, op).accumulator_size; },
      "dtype"_a, "op"_a, "Bytes in which a reduction keeps an element until it is complete.");
  m.def(
      "combine",
      [](DType dtype, ReduceOp op, const std::vector<std::uintptr_t>& sources,
         std::uintptr_t target, std::size_t count, int divisor, bool from_accumulators,
         bool to_accumulators) {
        std::vector<const std::byte*> from;
        for (std::uintptr_t source : sources)
          from.push_back(reinterpret_cast<const std::byte*>(source));
        auto* const to = reinterpret_cast<std::byte*>(target);
        Reducer reducer(dtype, op, std::vector<double>(sources.size(), 1.0));
        const WithoutGil released;
        reducer.run(from, {&to, 1}, count, {from_accumulators, to_accumulators, divisor});
      },
      "dtype"_a, "op"_a, "sources"_a, "target"_a, "count"_a, "divisor"_a, "from_accumulators"_a,
      "to_accumulators"_a = false,
      "Reduces along the tree over `sources`, and completes that unless the result stays in "
      "accumulators; the target may be one of the sources.");
  m.def(
      "streaming_copy",
      [](std::uintptr_t target, std::uintptr_t source, std::size_t nbytes) {
        const WithoutGil released;
        streaming_copy(reinterpret_cast<std::byte*>(target),
                       reinterpret_cast<const std::byte*>(source), nbytes);
      },
      "target"_a, "source"_a, "nbytes"_a, "Copies to memory that another process reads next.");
  m.def(
      "narrow",
      [](DType to, std::uintptr_t target, std::uintptr_t source, std::size_t count) {
        const Kernel kernel = checked_kernel(to, ReduceOp::sum);
        const WithoutGil released;
        kernel.store(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), count,
                     1);
      },
      "dtype"_a, "target"_a, "source"_a, "count"_a, "Rounds float32 to a 16-bit type.");
  m.def(
      "widen",
      [](DType from, std::uintptr_t target, std::uintptr_t source, std::size_t count) {
        const Kernel kernel = checked_kernel(from, ReduceOp::sum);
        const WithoutGil released;
        kernel.load(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), count,
                    1.0);
      },
      "dtype"_a, "target"_a, "source"_a, "count"_a, "Widens a 16-bit type to float32.");
}
}  // namespace sdp
