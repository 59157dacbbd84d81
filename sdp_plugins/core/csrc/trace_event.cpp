#include "trace_event.hpp"

#include <algorithm>
#include <numeric>

#include "request.hpp"

namespace sdp {
namespace {
std::uint64_t total(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Piece& piece) { return sum + piece.count; });
}
}  // namespace

TraceEvent TraceEvent::of(const Request& request) {
  TraceEvent event;
  event.count = request.op == Op::barrier ? 0 : request.count();
  event.nbytes = std::max(total(request.sends), total(request.recvs)) * itemsize(request.dtype);
  event.peer = is_rooted(request.op) ? request.root : request.peer;
  event.tag = request.tag;
  event.layout = request.layout;
  event.op = request.op;
  event.dtype = request.dtype;
  event.reduce_op = request.reduce_op;
  if (request.part) event.flags |= kStep;
  if (request.part && request.part->compares_only) event.flags |= kCompare;
  return event;
}
}  // namespace sdp
