#include "../reduction_tree.hpp"
#include "../shards.hpp"
#include "collectives.hpp"
#include "one_hop.hpp"

namespace sdp {

void reduce_scatter(Operation& op) {
  const Request& request = op.request();
  const Piece output = request.recvs[0];
  const auto mine = static_cast<std::size_t>(op.rank());
  OneHop hop(op, request.sends);
  const Reducer reducer(request.dtype, request.reduce_op, op.factors());
  const Reducer::Forms forms{.to_accumulators = request.part && request.part->accumulates};
  const std::size_t size = forms.to_accumulators ? reducer.accumulator_size() : op.itemsize();
  hop.run([&](std::size_t round) {
    const Range range = hop.part(op.rank(), mine, round).range;
    if (range.count == 0) return;
    op.divide(range.count, [&](Range part) {
      std::vector<const std::byte*> sources;
      for (int r = 0; r < op.world_size(); ++r) {
        // This rank's own piece is read in place.
        const std::byte* first = r == op.rank()
                                     ? request.sends[mine].data + range.begin * op.itemsize()
                                     : hop.part(r, mine, round).data;
        sources.push_back(first + part.begin * op.itemsize());
      }
      std::byte* const to = output.data + (range.begin + part.begin) * size;
      Reducer(reducer).run(sources, {&to, 1}, part.count, forms);
    });
  });
}
}  // namespace sdp
