#include "bindings.hpp"
#include "blocks.hpp"

namespace sdp {

void bind_blocks(nb::module_& m) {
  nb::enum_<BlockFormat>(m, "BlockFormat")
      .value("int8", BlockFormat::int8)
      .value("fp8", BlockFormat::fp8)
      .value("int4", BlockFormat::int4);
  m.def("blocks_nbytes", &blocks_nbytes, "format"_a, "count"_a,
        "Bytes of float32 values in blocks.");
  m.def(
      "pack_blocks",
      [](BlockFormat format, std::uintptr_t target, std::uintptr_t source, std::size_t count,
         std::uintptr_t residual, std::optional<std::uint32_t> seed) {
        const BlockKernels kernels = best_blocks()(format);
        const WithoutGil released;
        kernels.pack(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source),
                     reinterpret_cast<void*>(residual), count,
                     {seed.has_value(), seed.value_or(0)});
      },
      "format"_a, "target"_a, "source"_a, "count"_a, "residual"_a = 0, "seed"_a = nb::none(),
      "Rounds float32 to blocks: stochastically if there is a seed, else to the nearest. A "
      "residual is added to the values before, and becomes what the rounding has left out.");
  m.def(
      "unpack_blocks",
      [](BlockFormat format, std::uintptr_t target, std::uintptr_t source, std::size_t count) {
        const BlockKernels kernels = best_blocks()(format);
        const WithoutGil released;
        kernels.unpack(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source),
                       count);
      },
      "format"_a, "target"_a, "source"_a, "count"_a, "Widens blocks to float32.");
}
}  // namespace sdp
