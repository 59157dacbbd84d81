// The only file that knows Python. Everything that waits releases the GIL; no engine thread takes
// it.
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <string_view>
#include <tuple>

#include "api.hpp"
#include "engine.hpp"
#include "fusion.hpp"
#include "overlaps.hpp"
#include "point_to_point.hpp"
#include "reduce.hpp"
#include "report_signal.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sdp {
namespace {
using Pieces = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;

std::vector<Piece> as_pieces(const Pieces& pieces) {
  std::vector<Piece> converted;
  converted.reserve(pieces.size());
  for (const auto& [address, count] : pieces) {
    converted.push_back({reinterpret_cast<std::byte*>(address), count});
  }
  return converted;
}

Pieces as_pairs(const std::vector<Piece>& pieces) {
  Pieces pairs;
  for (const Piece& piece : pieces) {
    pairs.emplace_back(reinterpret_cast<std::uintptr_t>(piece.data), piece.count);
  }
  return pairs;
}

nb::bytes as_bytes(const std::vector<std::byte>& data) {
  return nb::bytes(data.data(), data.size());
}

nb::object as_exception(const Failure& failure) {
  nb::list ranks;
  for (int rank : failure.ranks) ranks.append(rank);
  const std::string_view text(failure.what());  // a part of it may come from a peer's memory
  const auto shown =
      nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  return nb::module_::import_("sdp_plugins.core.errors")
      .attr("from_native")(name(failure.kind), shown, nb::tuple(ranks), failure.op, failure.seq,
                           failure.elapsed_s, failure.group);
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    try {
      const nb::object error = as_exception(failure);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error& other) {
      other.restore();  // a signal has come meanwhile: Ctrl-C, that ended our peer too
    }
  } catch (const Interrupted& interrupted) {
    try {
      std::rethrow_exception(interrupted.cause);
    } catch (nb::python_error& error) {
      error.restore();
    }
  }
}

// Gives up the GIL while it lives. A thread that asks for it back when the interpreter is ending is
// ended in the midst of that by Python before 3.14, which C++ does not survive: so it waits for the
// end of the process instead, as later versions do.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Lets Python's signal handlers run (Ctrl-C) while the caller waits. Python runs them on the main
// thread only; another one must not ask for the GIL, which ends it when the interpreter is ending.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw Interrupted{std::make_exception_ptr(nb::python_error())};
}

// A group as Python sees it. Addresses are those of memory that the caller keeps alive until done.
class NativeGroup {
 public:
  NativeGroup(int rank, int world_size, std::vector<int> segment_fds, std::vector<int> sockets,
              std::vector<int> pidfds, std::size_t staging_bytes, int spin_us, std::vector<int> ids,
              int group_size, std::uint64_t token, std::vector<int> numbers)
      : communicator_(std::make_shared<Communicator>(
            Links{rank, world_size, std::move(segment_fds), std::move(sockets), std::move(pidfds),
                  std::move(ids), group_size, token, RankNames(std::move(numbers))},
            staging_bytes)),
        engine_(std::make_shared<Engine>(communicator_, spin_us)),
        point_to_point_(std::make_shared<PointToPoint>(communicator_, spin_us)) {}
  // In a forked child the group's threads do not exist; what they held when the fork happened,
  // locks and condition variables, can be neither used nor destroyed. All of it stays as it is.
  ~NativeGroup() {
    if (communicator_->ours()) return;
    new std::shared_ptr<Engine>(std::move(engine_));  // it holds the communicator
    new std::shared_ptr<PointToPoint>(std::move(point_to_point_));
  }

  void run(Op op, DType dtype, ReduceOp reduce_op, double factor, int root, const Pieces& sends,
           const Pieces& recvs, double timeout_s) {
    Request request = make(op, dtype, reduce_op, factor, root, sends, recvs, timeout_s);
    const WithoutGil released;
    engine_->run(std::move(request), check_signals);
  }
  std::shared_ptr<Work> submit(Op op, DType dtype, ReduceOp reduce_op, double factor, int root,
                               const Pieces& sends, const Pieces& recvs, double timeout_s) {
    Request request = make(op, dtype, reduce_op, factor, root, sends, recvs, timeout_s);
    const WithoutGil released;
    return engine_->submit(std::move(request));
  }
  void run_part(const std::string& title, const std::string& last_completed, std::uint64_t seq,
                bool accumulates, Op op, DType dtype, ReduceOp reduce_op, double factor, int root,
                const Pieces& sends, const Pieces& recvs, double timeout_s, double patience_s) {
    Request request = make(op, dtype, reduce_op, factor, root, sends, recvs, timeout_s);
    request.part = Part{title, last_completed, seq, false, accumulates, patience_s};
    const WithoutGil released;
    engine_->run(std::move(request), check_signals);
  }
  void compare(const std::string& title, const std::string& last_completed, std::uint64_t seq,
               Op op, DType dtype, ReduceOp reduce_op, int root, std::uint32_t layout,
               std::uint64_t count, double timeout_s, double patience_s) {
    Request request;
    request.op = op;
    request.dtype = dtype;
    request.reduce_op = reduce_op;
    request.root = root;
    request.layout = layout;
    request.recvs.push_back({nullptr, count});
    request.timeout_s = timeout_s;
    request.part = Part{title, last_completed, seq, true, false, patience_s};
    const WithoutGil released;
    engine_->run(std::move(request), check_signals);
  }
  void watch(const std::string& title) {
    const WithoutGil released;
    communicator_->watch(title);
  }
  void wait_elsewhere(bool waits) {
    communicator_->peers().own().header().elsewhere.store(waits ? 1 : 0);
  }
  void fail(const std::string& kind, const std::string& text, const std::vector<int>& ranks,
            const std::string& op, std::uint64_t seq, double elapsed_s) {
    communicator_->fail(Failure(failure_kind(kind), text, ranks, op, seq, elapsed_s));
  }
  void all_reduce(std::uintptr_t address, std::uint64_t count, DType dtype, ReduceOp reduce_op,
                  double timeout_s) {
    Request request;
    request.op = Op::all_reduce;
    request.dtype = dtype;
    request.reduce_op = reduce_op;
    request.recvs.push_back({reinterpret_cast<std::byte*>(address), count});
    request.timeout_s = timeout_s;
    check(request);
    const WithoutGil released;
    engine_->run(std::move(request), check_signals);
  }
  std::shared_ptr<Work> send(std::uintptr_t address, std::uint64_t count, DType dtype, int peer,
                             std::uint32_t tag, double timeout_s) {
    return post(Op::send, address, count, dtype, peer, tag, timeout_s);
  }
  std::shared_ptr<Work> recv(std::uintptr_t address, std::uint64_t count, DType dtype, int peer,
                             std::uint32_t tag, double timeout_s) {
    return post(Op::recv, address, count, dtype, peer, tag, timeout_s);
  }
  std::shared_ptr<Work> recv_any(std::uintptr_t address, std::uint64_t count, DType dtype,
                                 std::uint32_t tag, double timeout_s, std::uint64_t seq) {
    return post(Op::recv, address, count, dtype, -1, tag, timeout_s, seq);
  }
  std::optional<EventRing::Ticket> take_back(const Work& work) {
    const WithoutGil released;
    return point_to_point_->take_back(work);
  }
  void others_have_left() {
    const WithoutGil released;
    point_to_point_->others_have_left();
  }
  std::vector<int> gone() const {
    std::vector<int> ranks;
    for (const auto& [rank, why] : communicator_->peers().gone()) {
      ranks.push_back(communicator_->peers().id(rank));
    }
    return ranks;
  }
  std::vector<int> ended() const {
    return communicator_->peers().ids(communicator_->peers().dead());
  }
  std::uint64_t add_region(std::uintptr_t address, std::uint64_t nbytes, int fd,
                           std::uint64_t offset) {
    communicator_->throw_if_failed();
    return communicator_->regions().add(reinterpret_cast<std::byte*>(address), nbytes, fd, offset);
  }
  void remove_region(std::uint64_t region) {
    // A finalizer may come in a forked child too, whose parent still uses the memory.
    if (communicator_->ours() && !communicator_->closed()) communicator_->regions().remove(region);
  }
  std::pair<std::uintptr_t, std::uint64_t> allocate(std::size_t nbytes) {
    const auto shared = communicator_->allocate(nbytes);
    return {reinterpret_cast<std::uintptr_t>(shared.data), shared.region};
  }
  void release(std::uint64_t region) {
    if (communicator_->ours()) communicator_->release(region);  // as above
  }
  void abort(const std::string& reason) {
    communicator_->fail(Failure(FailureKind::aborted, reason, {communicator_->id()}));
  }
  nb::object failure() const {
    try {
      communicator_->throw_if_failed();
    } catch (const Failure& failure) {
      return as_exception(failure);
    }
    return nb::none();
  }
  void start_trace() { communicator_->trace().start(); }
  void stop_trace() { communicator_->trace().stop(); }
  bool traced() const { return communicator_->trace().on(); }
  std::pair<nb::bytes, std::uint64_t> trace_events() const {
    std::uint64_t dropped = 0;
    const std::vector<TraceEvent> events = communicator_->trace().events(dropped);
    return {nb::bytes(events.data(), events.size() * sizeof(TraceEvent)), dropped};
  }
  void add_trace_event(const nb::bytes& packed) {
    if (traced()) communicator_->trace().add(unpacked(packed));
  }
  std::uint64_t token() const { return communicator_->peers().token(); }
  void set_recording(bool on) { communicator_->flight().set_on(on); }
  std::uint64_t record(const nb::bytes& packed, std::uint64_t ticket) {
    communicator_->flight().write(unpacked(packed), ticket);
    return ticket;
  }
  // Who reads meanwhile finds no text that says something, and leaves the rank out this once.
  void set_about(const nb::bytes& text) {
    if (text.size() >= FlightArea::kAboutBytes) throw nb::value_error("the text is too long");
    std::memcpy(communicator_->peers().own().flight().about, text.c_str(), text.size() + 1);
  }
  std::string head() const { return communicator_->head(); }
  void set_head(std::string text) { communicator_->set_head(std::move(text)); }
  void meet(const nb::bytes& text, std::uint64_t since_ns) {
    communicator_->flight().meet({text.c_str(), text.size()}, since_ns);
  }
  nb::bytes flight(int rank) const {
    if (rank < 0 || rank >= communicator_->world_size()) throw nb::index_error("no such rank");
    return as_bytes(copy_flight(communicator_->peers().segment(rank)));
  }
  void close() {
    const WithoutGil released;
    engine_->close();
    point_to_point_->close();
  }
  std::uint64_t issued() const { return engine_->issued(); }
  const char* last_path() const { return name(communicator_->last_path()); }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  static TraceEvent unpacked(const nb::bytes& packed) {
    TraceEvent event;
    if (packed.size() != sizeof event) throw nb::value_error("no event is of this size");
    std::memcpy(&event, packed.c_str(), sizeof event);
    return event;
  }
  Request make(Op op, DType dtype, ReduceOp reduce_op, double factor, int root, const Pieces& sends,
               const Pieces& recvs, double timeout_s) const {
    Request request;
    request.op = op;
    request.dtype = dtype;
    request.reduce_op = reduce_op;
    request.factor = factor;
    request.root = root;
    request.sends = as_pieces(sends);
    request.recvs = as_pieces(recvs);
    request.timeout_s = timeout_s;
    check(request);
    return request;
  }
  // A pair that has no meaning is the caller's fault and must not fail the group.
  void check(const Request& request) const {
    if (reduces(request.op))
      checked_kernel(communicator_->kernels(), request.dtype, request.reduce_op);
  }
  std::shared_ptr<Work> post(Op op, std::uintptr_t address, std::uint64_t count, DType dtype,
                             int peer, std::uint32_t tag, double timeout_s, std::uint64_t seq = 0) {
    Request request;
    request.op = op;
    request.dtype = dtype;
    request.peer = peer;
    request.tag = tag;
    request.seq = seq;
    request.timeout_s = timeout_s;
    (op == Op::send ? request.sends : request.recvs)
        .push_back({reinterpret_cast<std::byte*>(address), count});
    const WithoutGil released;
    return point_to_point_->submit(std::move(request));
  }

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<PointToPoint> point_to_point_;
};

class NativeFusionBuffer {
 public:
  NativeFusionBuffer(const NativeGroup& group,
                     const std::vector<std::pair<std::uint64_t, DType>>& tensors,
                     std::size_t threshold_bytes, ReduceOp op, double timeout_s, nb::object submit)
      : submit_(std::move(submit)) {
    std::vector<TensorSpec> specs;
    for (const auto& [count, dtype] : tensors) specs.push_back({count, dtype});
    buffer_ = std::make_unique<FusionBuffer>(
        group.communicator(), submit_.is_none() ? FusionBuffer::to(group.engine()) : to(submit_),
        std::move(specs), FusionBuffer::Settings{threshold_bytes, op, timeout_s});
  }
  ~NativeFusionBuffer() {
    if (buffer_ && !buffer_->ours()) (void)buffer_.release();  // see ~NativeGroup
    // It waits for the engine, which may wait for a caller that needs the GIL to go on.
    const WithoutGil released;
    buffer_.reset();
  }
  void ready(std::size_t tensor, std::uintptr_t address) {
    const WithoutGil released;
    buffer_->ready(tensor, reinterpret_cast<std::byte*>(address));
  }
  void finish() {
    const WithoutGil released;
    buffer_->finish(check_signals);
  }
  std::vector<std::vector<std::size_t>> buckets() const {
    std::vector<std::vector<std::size_t>> tensors;
    for (const auto& bucket : buffer_->plan().buckets()) tensors.push_back(bucket.tensors);
    return tensors;
  }

 private:
  static FusionBuffer::Submit to(nb::handle submit) {
    return [submit](const Request& request) {
      const nb::gil_scoped_acquire gil;
      return nb::cast<std::shared_ptr<Work>>(submit(request.dtype, request.reduce_op,
                                                    as_pairs(request.recvs), request.timeout_s,
                                                    request.layout));
    };
  }
  nb::object submit_;  // outlives the buffer, whose end does not have the GIL
  std::unique_ptr<FusionBuffer> buffer_;
};
}  // namespace
}  // namespace sdp

NB_MODULE(_native, m) {
  using namespace sdp;
  m.doc() = "The native core: shared-memory collectives and balanced fusion buffers.";
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // frameworks keep groups in globals until the interpreter ends

  nb::enum_<DType> dtype(m, "DType", nb::is_arithmetic());
  for (int i = 0; i < kDTypes; ++i) {
    const auto value = static_cast<DType>(i);
    dtype.value(name(value).data(), value);
  }
  nb::enum_<ReduceOp> reduce_op(m, "ReduceOp", nb::is_arithmetic());
  for (int i = 0; i < kReduceOps; ++i) {
    const auto value = static_cast<ReduceOp>(i);
    reduce_op.value(name(value).data(), value);
  }
  nb::enum_<Op> op(m, "Op", nb::is_arithmetic());
  for (int i = 0; i < kOps; ++i) {
    const auto value = static_cast<Op>(i);
    op.value(name(value).data(), value);
  }

  m.def("itemsize", &itemsize, "dtype"_a, "Bytes of one element.");
  m.def(
      "supports",
      [](DType dtype, ReduceOp op) { return static_cast<bool>(best_kernels()(dtype, op)); },
      "dtype"_a, "op"_a, "Whether the reduction is defined for the type.");
  m.def("reduces", &reduces, "op"_a, "Whether an operation carries a reduction.");
  m.def("counts_must_agree", &counts_must_agree, "op"_a,
        "Whether all ranks' buffers have one length.");
  m.def(
      "misplaced",
      [](const Pieces& sends, const Pieces& recvs, int rank, std::size_t itemsize) {
        return misplaced(as_pieces(sends), as_pieces(recvs), rank, itemsize);
      },
      "sends"_a, "recvs"_a, "rank"_a, "itemsize"_a,
      "Indices of inputs that would be overwritten before every rank has read them.");
  m.def(
      "path_name", [](int path) { return name(static_cast<Path>(path)); }, "path"_a,
      "What `last_path` calls the path of a traced event.");
  m.attr("TRACE_EVENTS") = Trace::kEvents;
  m.def(
      "accumulator_size",
      [](DType dtype, ReduceOp op) {
        return checked_kernel(best_kernels(), dtype, op).accumulator_size;
      },
      "dtype"_a, "op"_a, "Bytes in which a reduction keeps an element until it is complete.");
  m.def(
      "describe",
      [](Op op, DType dtype, ReduceOp reduce_op, int root, const Pieces& sends, const Pieces& recvs,
         double timeout_s, int rank, int world_size, int peer, std::uint32_t tag,
         std::vector<int> numbers) {
        Request request;
        request.op = op;
        request.dtype = dtype;
        request.reduce_op = reduce_op;
        request.root = root;
        request.sends = as_pieces(sends);
        request.recvs = as_pieces(recvs);
        request.timeout_s = timeout_s;
        request.peer = peer;
        request.tag = tag;
        if (reduces(op)) checked_kernel(best_kernels(), dtype, reduce_op);
        request.validate(rank, world_size);
        return request.describe(RankNames(std::move(numbers)));
      },
      "op"_a, "dtype"_a, "reduce_op"_a, "root"_a, "sends"_a, "recvs"_a, "timeout_s"_a, "rank"_a,
      "world_size"_a, "peer"_a = -1, "tag"_a = 0, "numbers"_a = std::vector<int>(),
      "Checks a call as far as one rank can; what messages say of it, which call the ranks by "
      "`numbers`.");
  m.def(
      "combine",
      [](DType dtype, ReduceOp op, const std::vector<std::uintptr_t>& sources,
         std::uintptr_t target, std::size_t count, int divisor, bool from_accumulators,
         bool to_accumulators) {
        std::vector<const std::byte*> from;
        for (std::uintptr_t source : sources)
          from.push_back(reinterpret_cast<const std::byte*>(source));
        auto* const to = reinterpret_cast<std::byte*>(target);
        Reducer reducer(best_kernels(), dtype, op, std::vector<double>(sources.size(), 1.0));
        const WithoutGil released;
        reducer.run(from, {&to, 1}, count, {from_accumulators, to_accumulators, divisor});
      },
      "dtype"_a, "op"_a, "sources"_a, "target"_a, "count"_a, "divisor"_a, "from_accumulators"_a,
      "to_accumulators"_a = false,
      "Reduces along the tree over `sources`, and completes that unless the result stays in "
      "accumulators; the target may be one of the sources.");
  m.def(
      "narrow",
      [](DType to, std::uintptr_t target, std::uintptr_t source, std::size_t count) {
        const Kernel kernel = checked_kernel(best_kernels(), to, ReduceOp::sum);
        const WithoutGil released;
        kernel.store(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), count,
                     1);
      },
      "dtype"_a, "target"_a, "source"_a, "count"_a, "Rounds float32 to a 16-bit type.");
  m.def(
      "widen",
      [](DType from, std::uintptr_t target, std::uintptr_t source, std::size_t count) {
        const Kernel kernel = checked_kernel(best_kernels(), from, ReduceOp::sum);
        const WithoutGil released;
        kernel.load(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), count,
                    1.0);
      },
      "dtype"_a, "target"_a, "source"_a, "count"_a, "Widens a 16-bit type to float32.");
  m.def(
      "api", [] { return reinterpret_cast<std::uintptr_t>(api()); },
      "Address of the functions of sdp_api.h.");
  m.def(
      "make_endpoint",
      [](nb::object submit) {
        // Both are never freed, see SdpEndpoint.
        const nb::handle held = submit.release();
        return reinterpret_cast<std::uintptr_t>(make_endpoint([held](const Request& request) {
          const nb::gil_scoped_acquire gil;
          return nb::cast<std::shared_ptr<Work>>(
              held(request.op, request.dtype, request.reduce_op, as_pairs(request.sends),
                   as_pairs(request.recvs), request.timeout_s, request.layout));
        }));
      },
      "submit"_a, "An SdpEndpoint of a group whose operations are not the native group's own.");
  m.def("initialize_segment", &initialize_segment, "fd"_a, "rank"_a, "world_size"_a,
        "staging_bytes"_a,
        "Sizes a memory file and writes its header, before the rendezvous; returns where its text "
        "about the rank goes, of at most FLIGHT_ABOUT_BYTES with the 0 that ends it.");
  m.attr("FLIGHT_ABOUT_BYTES") = FlightArea::kAboutBytes;
  m.attr("FLIGHT_MEETING_BYTES") = FlightMeeting::kTextBytes;
  m.attr("FLIGHT_SLOTS") =
      std::make_tuple(FlightRings::kOperations, FlightRings::kMessages, FlightRings::kSteps);
  m.def(
      "read_flight", [](int fd) { return as_bytes(read_flight(fd)); }, "fd"_a,
      "`NativeGroup.flight` of a segment's file, of which nothing is believed.");
  m.def(
      "take_report_signal", &take_report_signal, "number"_a, "eventfd"_a,
      "Has a signal written to the descriptor, if nobody else handles or ignores it; whether so.");
  m.def("give_back_report_signal", &give_back_report_signal, "number"_a,
        "Undoes that, unless somebody else has taken the signal since.");
  m.def(
      "explain",
      [](Op op, std::size_t nbytes, bool registered) {
        const Path path = choose_path(op, nbytes, registered);
        return std::string(name(path)) + ": " + reason(path);
      },
      "op"_a, "nbytes"_a, "registered"_a,
      "The path for an operation in which each rank shows `nbytes`, and why.");

  m.def(
      "address",
      [](nb::handle exporter) {
        Py_buffer view;
        if (PyObject_GetBuffer(exporter.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto at = reinterpret_cast<std::uintptr_t>(view.buf);
        PyBuffer_Release(&view);
        return at;
      },
      "exporter"_a, "Where a contiguous object's memory lies, by the buffer protocol.");
  m.def(
      "inspect",
      [](const nb::object& owner) {
        nb::ndarray<> writable;
        nb::ndarray<nb::ro> array;  // no copies of either
        const bool may_write = nb::try_cast(owner, writable, false);
        if (!nb::try_cast(owner, array, false)) throw nb::type_error("not an array");
        std::vector<std::size_t> shape;
        std::vector<std::int64_t> strides;
        for (std::size_t i = 0; i < array.ndim(); ++i) {
          shape.push_back(array.shape(i));
          strides.push_back(array.stride(i));
        }
        return std::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape, strides,
                               int{array.dtype().code}, int{array.dtype().bits}, may_write);
      },
      "array"_a,
      "(address, shape, strides in elements, DLPack type code, bits, writable) of an array.");

  nb::class_<Work>(m, "Work", "A handle on an operation that an engine will finish.")
      .def(nb::init<>())
      .def(
          "finish",
          [](Work& work, int source_rank) {
            const WithoutGil released;  // callbacks are other frameworks'
            work.finish(std::nullopt, source_rank);
          },
          "source_rank"_a = -1, "Done; called once, by whoever ran the operation.")
      .def(
          "fail",
          [](Work& work, const std::string& kind, const std::string& text,
             const std::vector<int>& ranks, const std::string& op, std::uint64_t seq,
             double elapsed_s, std::uint64_t group) {
            Failure failure(failure_kind(kind), text, ranks, op, seq, elapsed_s);
            failure.group = group;
            const WithoutGil released;
            work.finish(std::move(failure));
          },
          "kind"_a, "text"_a, "ranks"_a, "op"_a, "seq"_a, "elapsed_s"_a, "group"_a = 0,
          "Done, with a failure; `group`: token of the group that has failed by it.")
      .def(
          "wait",
          [](Work& work, double timeout_s) {
            const WithoutGil released;
            return work.wait(timeout_s, check_signals);
          },
          "timeout_s"_a,
          "True when done, False after the time-out; raises the operation's failure.")
      .def("completed", &Work::completed)
      .def(
          "failure",
          [](const Work& work) -> nb::object {
            const auto failure = work.failure();
            return failure ? as_exception(*failure) : nb::none();
          },
          nb::sig("def failure(self) -> BaseException | None"),
          "The operation's failure, if it has completed with one.")
      .def("source_rank", &Work::source_rank)
      .def(
          "waiter",
          [](const Work& work) {
            const Work::Waiter waiter = work.waiter();
            return std::make_pair(waiter.since_ns, waiter.thread);
          },
          "(since, thread) of the first to wait for it before it was done, by the monotonic clock "
          "in "
          "nanoseconds; 0 if nobody did.");

  nb::class_<NativeGroup>(m, "NativeGroup", "The ranks of a group on this node.")
      .def(nb::init<int, int, std::vector<int>, std::vector<int>, std::vector<int>, std::size_t,
                    int, std::vector<int>, int, std::uint64_t, std::vector<int>>(),
           "rank"_a, "world_size"_a, "segment_fds"_a, "sockets"_a, "pidfds"_a, "staging_bytes"_a,
           "spin_us"_a = -1, "ids"_a = std::vector<int>(), "group_size"_a = 0, "token"_a = 0,
           "numbers"_a = std::vector<int>(),
           "Takes ownership of all file descriptors, also if it raises. `ids`: the ranks' places, "
           "where they are one node's share of a group of `group_size`. `numbers`: by which "
           "messages call the group's ranks, if not by these.")
      .def("run", &NativeGroup::run, "op"_a, "dtype"_a, "reduce_op"_a, "factor"_a, "root"_a,
           "sends"_a, "recvs"_a, "timeout_s"_a, "Blocks until the collective is done.")
      .def("submit", &NativeGroup::submit, "op"_a, "dtype"_a, "reduce_op"_a, "factor"_a, "root"_a,
           "sends"_a, "recvs"_a, "timeout_s"_a, "Queues the collective.")
      .def("run_part", &NativeGroup::run_part, "title"_a, "last_completed"_a, "seq"_a,
           "accumulates"_a, "op"_a, "dtype"_a, "reduce_op"_a, "factor"_a, "root"_a, "sends"_a,
           "recvs"_a, "timeout_s"_a, "patience_s"_a,
           "`run` for a step of a larger group's operation, of which messages speak.")
      .def("compare", &NativeGroup::compare, "title"_a, "last_completed"_a, "seq"_a, "op"_a,
           "dtype"_a, "reduce_op"_a, "root"_a, "layout"_a, "count"_a, "timeout_s"_a, "patience_s"_a,
           "Blocks until all ranks here have announced this operation of the larger group.")
      .def("watch", &NativeGroup::watch, "title"_a,
           "Raises if a rank here has failed or ended, without waiting.")
      .def("wait_elsewhere", &NativeGroup::wait_elsewhere, "waits"_a,
           "Says whether this rank waits for one of another node; those here are patient then.")
      .def("fail", &NativeGroup::fail, "kind"_a, "text"_a, "ranks"_a, "op"_a, "seq"_a,
           "elapsed_s"_a, "Fails the group for a reason found elsewhere; the first one stays.")
      .def("all_reduce", &NativeGroup::all_reduce, "address"_a, "count"_a, "dtype"_a, "reduce_op"_a,
           "timeout_s"_a, "`run` for the most frequent call, with less to convert.")
      .def("send", &NativeGroup::send, "address"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a,
           "timeout_s"_a)
      .def("recv", &NativeGroup::recv, "address"_a, "count"_a, "dtype"_a, "peer"_a, "tag"_a,
           "timeout_s"_a)
      .def("recv_any", &NativeGroup::recv_any, "address"_a, "count"_a, "dtype"_a, "tag"_a,
           "timeout_s"_a, "seq"_a,
           "Receives from any rank of this node, for a larger group, which counts its messages, "
           "looks at the time as long as others may send, and may take it back.")
      .def("take_back", &NativeGroup::take_back, "work"_a,
           "Ends a receive that no message has come for: its work is the caller's to finish. The "
           "ticket of its record; None if a message has come.")
      .def("others_have_left", &NativeGroup::others_have_left,
           "Says that no rank of another node sends any more.")
      .def("ended", &NativeGroup::ended, "The ranks of this node whose processes have ended.")
      .def("gone", &NativeGroup::gone, "The ranks of this node that have ended or left.")
      .def("add_region", &NativeGroup::add_region, "address"_a, "nbytes"_a, "fd"_a, "offset"_a,
           "Offers a shared mapping to the peers; returns its id. The fd is duplicated.")
      .def("remove_region", &NativeGroup::remove_region, "region"_a)
      .def("allocate", &NativeGroup::allocate, "nbytes"_a,
           "(address, region) of zero-filled memory that peers can map; until `release`.")
      .def("release", &NativeGroup::release, "region"_a)
      .def("abort", &NativeGroup::abort, "reason"_a)
      .def("failure", &NativeGroup::failure, nb::sig("def failure(self) -> BaseException | None"),
           "Why the group is unusable, or None.")
      .def("start_trace", &NativeGroup::start_trace, "Records operations from now on.")
      .def("stop_trace", &NativeGroup::stop_trace)
      .def_prop_ro("traced", &NativeGroup::traced)
      .def("trace_events", &NativeGroup::trace_events,
           "Recorded events, packed, oldest first; how many older ones were dropped.")
      .def("add_trace_event", &NativeGroup::add_trace_event, "event"_a,
           "Records an event of an operation that is not run here.")
      .def("record", &NativeGroup::record, "event"_a, "ticket"_a = 0,
           "Shows such an event in the flight recorder, or its next version in the place that the "
           "ticket stands for; returns the ticket.")
      .def_prop_ro("token", &NativeGroup::token, "Of the group, on all its ranks.")
      .def("set_recording", &NativeGroup::set_recording, "on"_a,
           "Switches the flight recorder off, to measure what it costs.")
      .def("set_about", &NativeGroup::set_about, "text"_a,
           "Replaces the text about this rank, see `initialize_segment`.")
      .def_prop_ro("head", &NativeGroup::head, "How messages begin: `[rank 3/8] `.")
      .def("set_head", &NativeGroup::set_head, "text"_a, "Changes `head`.")
      .def("meet", &NativeGroup::meet, "text"_a, "since_ns"_a,
           "Shows that this process is making another group, since when; 0: none.")
      .def("flight", &NativeGroup::flight, "rank"_a,
           "What a rank of this node shows of itself and its last operations: see FlightHead.")
      .def("close", &NativeGroup::close)
      .def(
          "endpoint",
          [](const NativeGroup& group) {
            return reinterpret_cast<std::uintptr_t>(make_endpoint(group.engine()));
          },
          "A new SdpEndpoint, which is never freed.")
      .def_prop_ro("issued", &NativeGroup::issued)
      .def_prop_ro("last_path", &NativeGroup::last_path);

  nb::class_<NativeFusionBuffer>(m, "NativeFusionBuffer", "Balanced fusion buffers.")
      .def(nb::init<const NativeGroup&, const std::vector<std::pair<std::uint64_t, DType>>&,
                    std::size_t, ReduceOp, double, nb::object>(),
           "group"_a, "tensors"_a, "threshold_bytes"_a, "op"_a, "timeout_s"_a,
           "submit"_a = nb::none(),
           "`submit`: takes the buffers' operations, where they are not the native group's own.")
      .def("ready", &NativeFusionBuffer::ready, "tensor"_a, "address"_a)
      .def("finish", &NativeFusionBuffer::finish)
      .def("buckets", &NativeFusionBuffer::buckets, "Indices of the tensors in each buffer.");
}
