#include "aliased_inputs.hpp"
#include "bindings.hpp"
#include "reduction_tree.hpp"
#include "trace_event.hpp"
#include "work.hpp"

namespace sdp {

void bind_requests(nb::module_& m) {
  nb::class_<Part>(m, "Part", "What makes a request one step of a larger group's operation.")
      .def(
          "__init__",
          [](Part* self, const OpSignature& operation, std::optional<OpSignature> last_completed,
             double patience_s, bool accumulates, bool compares_only) {
            new (self) Part{operation, last_completed.value_or(OpSignature{}), compares_only,
                            accumulates, patience_s};
          },
          "operation"_a, "last_completed"_a.none(), "patience_s"_a, "accumulates"_a = false,
          "compares_only"_a = false,
          "`operation`: of which messages speak. `patience_s`: added to the time-out while all "
          "that are late wait for other nodes. `accumulates`: a reduction stays in accumulators. "
          "`compares_only`: ends when all ranks here have announced the operation.");
  nb::class_<Request>(m, "Request", "An operation as its caller describes it.")
      .def(
          "__init__",
          [](Request* self, Op op, DType dtype, std::vector<Piece> sends, std::vector<Piece> recvs,
             double timeout_s, ReduceOp reduce_op, int root) {
            new (self) Request{.op = op,
                               .dtype = dtype,
                               .reduce_op = reduce_op,
                               .root = root,
                               .sends = std::move(sends),
                               .recvs = std::move(recvs),
                               .timeout_s = timeout_s};
          },
          "op"_a, "dtype"_a, "sends"_a, "recvs"_a, "timeout_s"_a, "reduce_op"_a = ReduceOp::sum,
          "root"_a = -1,
          "Pieces of memory are given by address and number of elements; their owners have to keep "
          "them until the operation is done.")
      .def("__copy__", [](const Request& request) { return request; })
      .def_ro("op", &Request::op)
      .def_ro("dtype", &Request::dtype)
      .def_ro("reduce_op", &Request::reduce_op)
      .def_ro("root", &Request::root)
      .def_rw("sends", &Request::sends)
      .def_ro("recvs", &Request::recvs)
      .def_rw("timeout_s", &Request::timeout_s)
      .def_rw("factor", &Request::factor, "Of PREMUL_SUM.")
      .def_ro("layout", &Request::layout, "Of a fusion buffer.")
      .def_rw("peer", &Request::peer, "Of a send or a receive; -1: from any rank.")
      .def_rw("tag", &Request::tag)
      .def_rw("seq", &Request::seq, "Of a message that is counted elsewhere.")
      .def_rw("part", &Request::part)
      .def_rw("work", &Request::work, nb::for_getter(nb::sig("def work(self, /) -> Work | None")),
              "Of a request that was submitted; None: nothing uses its memory yet.")
      .def_prop_ro("count", &Request::count, "Elements that all ranks must agree on.")
      .def("signature", &Request::signature, "seq"_a, "What identifies it in messages.")
      .def(
          "validate",
          [](const Request& request, int rank, int world_size) {
            if (reduces(request.op)) checked_kernel(request.dtype, request.reduce_op);
            request.validate(rank, world_size);
          },
          "rank"_a, "world_size"_a, "Raises for what can be seen without any other rank.")
      .def("aliased_inputs", &aliased_inputs, "rank"_a,
           "Indices of inputs that would be overwritten before every rank has read them.")
      .def(
          "trace_event",
          [](const Request& request) {
            const TraceEvent event = TraceEvent::of(request);
            return nb::bytes(&event, sizeof event);
          },
          "What is recorded of it, packed.");
}
}  // namespace sdp
