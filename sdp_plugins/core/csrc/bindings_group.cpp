#include <cstring>

#include "api.hpp"
#include "bindings.hpp"
#include "engine.hpp"
#include "flight_reader.hpp"
#include "fusion.hpp"
#include "point_to_point.hpp"
#include "written_pages.hpp"

namespace sdp {
namespace {

std::uintptr_t address_of(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

// A group as Python uses it. The caller keeps the memory of an operation alive until its end.
class NativeGroup {
 public:
  NativeGroup(int rank, int world_size, std::vector<int> segment_fds, std::vector<int> sockets,
              std::vector<int> pidfds, std::size_t staging_bytes, int spin_us, std::vector<int> ids,
              int group_size, std::uint64_t token, std::vector<int> global_ranks, int threads)
      : communicator_(std::make_shared<Communicator>(
            Links{rank, world_size, std::move(segment_fds), std::move(sockets), std::move(pidfds),
                  std::move(ids), group_size, token, RankNames(std::move(global_ranks))},
            staging_bytes, threads)),
        engine_(std::make_shared<Engine>(communicator_, spin_us)),
        point_to_point_(std::make_shared<PointToPoint>(communicator_, spin_us)) {}
  // In a forked child the group's threads do not exist. Locks and condition variables that they
  // held at the fork can be neither used nor destroyed, so all of them are leaked.
  ~NativeGroup() {
    if (communicator_->ours()) return;
    new std::shared_ptr<Engine>(std::move(engine_));  // the engine holds the communicator
    new std::shared_ptr<PointToPoint>(std::move(point_to_point_));
  }

  void run(const Request& request) {
    check(request);
    engine_->run(request, check_signals);
  }
  // Each piece of the request becomes an operation; returns the last one's Work.
  std::shared_ptr<Work> submit_at_flags(Request& request, const std::vector<FlagAddresses>& flags) {
    check(request);
    if (flags.empty() || flags.size() != request.recvs.size())
      throw std::invalid_argument("there are " + std::to_string(request.recvs.size()) +
                                  " pieces of memory, but flags of " +
                                  std::to_string(flags.size()));
    for (std::size_t i = 0; i < flags.size(); ++i) {
      Request piece = request;
      piece.recvs = {request.recvs[i]};
      piece.device_flags = flags_at(flags[i]);
      request.work = engine_->submit(std::move(piece));  // if a later one fails, this has started
    }
    return request.work;
  }
  std::shared_ptr<Work> submit(Request& request) {
    check(request);
    const bool is_message = request.op == Op::send || request.op == Op::recv;
    request.work = is_message ? point_to_point_->submit(request) : engine_->submit(request);
    return request.work;
  }
  void check_peers(const OpSignature& operation, const std::optional<OpSignature>& last_completed,
                   double elapsed_s) {
    communicator_->check_peers(operation, last_completed.value_or(OpSignature{}), elapsed_s);
  }
  void set_waiting_remote(bool waits) {
    communicator_->peers().own().header().waiting_remote.store(waits ? 1 : 0);
  }
  void fail(const Failure& failure) { communicator_->fail(failure); }
  std::optional<EventRing::Ticket> take_back(const Work& work) {
    return point_to_point_->take_back(work);
  }
  void others_have_left() { point_to_point_->others_have_left(); }
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
    return communicator_->add_region(reinterpret_cast<std::byte*>(address), nbytes, fd, offset);
  }
  void remove_region(std::uint64_t region) {
    // A finalizer may run in a forked child while the parent still uses the memory.
    if (communicator_->ours() && !communicator_->closed()) communicator_->regions().remove(region);
  }
  std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t> allocate(std::size_t nbytes,
                                                                     bool with_view) {
    const auto shared = communicator_->allocate(nbytes, with_view);
    return {address_of(shared.data), address_of(shared.view), shared.region};
  }
  void free(std::uint64_t region) {
    if (communicator_->ours()) communicator_->release(region);  // as in remove_region
  }
  std::optional<std::tuple<std::uintptr_t, std::uintptr_t, nb::capsule>> map_region(
      int rank, std::uint64_t region) {
    auto mapped = communicator_->regions().mapping(rank, region);
    if (mapped == nullptr) return std::nullopt;
    const auto shared = address_of(mapped->shared.data());
    const auto view = address_of(mapped->view.data());
    auto owned = std::make_unique<std::shared_ptr<const MappedFile>>(std::move(mapped));
    nb::capsule owner(owned.get(), [](void* held) noexcept {
      delete static_cast<std::shared_ptr<const MappedFile>*>(held);
    });
    (void)owned.release();
    return std::tuple(shared, view, owner);
  }
  void abort(const std::string& reason) {
    Failure failure(FailureKind::aborted, reason, {communicator_->id()}, Hint::new_group);
    communicator_->fail(failure.in("abort"));
  }
  bool failed() const { return communicator_->failure().has_value(); }
  nb::object failure() const {
    const auto failure = communicator_->failure();
    return failure ? as_exception(*failure, false) : nb::none();
  }
  void raise_if_failed() const { communicator_->throw_if_failed(); }
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
    const TraceEvent event = unpacked(packed);
    communicator_->flight().write(event, ticket);
    const bool failed = (event.flags & TraceEvent::kFailed) != 0;
    if (event.finished_ns != 0 && !failed) communicator_->flight().count(event, 0);
    return ticket;
  }
  // A concurrent reader finds no valid text, and skips the rank in that snapshot.
  void set_rank_info(const nb::bytes& text) {
    if (text.size() >= FlightArea::kRankInfoBytes) throw nb::value_error("the text is too long");
    std::memcpy(communicator_->peers().own().flight().rank_info, text.c_str(), text.size() + 1);
  }
  std::string error_prefix() const { return communicator_->error_prefix(); }
  void set_error_prefix(std::string text) { communicator_->set_error_prefix(std::move(text)); }
  void show_forming(const nb::bytes& text, std::uint64_t since_ns) {
    communicator_->flight().show_forming({text.c_str(), text.size()}, since_ns);
  }
  nb::bytes flight(int rank) const { return as_bytes(copy_flight(segment(rank))); }
  nb::bytes counters(int rank) const { return as_bytes(copy_counters(segment(rank))); }
  void close() {
    engine_->close();
    point_to_point_->close();
  }
  std::uint64_t issued() const { return engine_->issued(); }
  const char* last_path() const { return name(communicator_->last_path()); }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }

 private:
  const Segment& segment(int rank) const {
    if (rank < 0 || rank >= communicator_->world_size()) throw nb::index_error("no such rank");
    return communicator_->peers().segment(rank);
  }
  static TraceEvent unpacked(const nb::bytes& packed) {
    TraceEvent event;
    if (packed.size() != sizeof event) throw nb::value_error("no event is of this size");
    std::memcpy(&event, packed.c_str(), sizeof event);
    return event;
  }
  // An unsupported pair (dtype, op) is the caller's error and must not fail the group.
  void check(const Request& request) const {
    if (reduces(request.op)) checked_kernel(request.dtype, request.reduce_op);
  }

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<PointToPoint> point_to_point_;
};

// Calls Python's `submit`, which is borrowed.
FusionBuffer::Submit calling(nb::handle submit) {
  return [submit](const Request& request) {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::shared_ptr<Work>>(submit(request));
  };
}

class NativeFusionBuffer {
 public:
  NativeFusionBuffer(const NativeGroup& group,
                     const std::vector<std::pair<std::uint64_t, DType>>& tensors,
                     std::size_t threshold_bytes, ReduceOp op, double timeout_s, nb::object submit)
      : submit_(std::move(submit)) {
    std::vector<TensorSpec> specs;
    for (const auto& [count, dtype] : tensors) specs.push_back({count, dtype});
    buffer_ = std::make_unique<FusionBuffer>(
        group.communicator(),
        submit_.is_none() ? FusionBuffer::to(group.engine()) : calling(submit_), std::move(specs),
        FusionBuffer::Settings{threshold_bytes, op, timeout_s});
  }
  ~NativeFusionBuffer() {
    if (buffer_ && !buffer_->ours()) (void)buffer_.release();  // see ~NativeGroup
    // The destructor waits for the engine, which may wait for a caller that needs the GIL.
    const WithoutGil released;
    buffer_.reset();
  }
  void ready(std::size_t tensor, std::uintptr_t address) {
    buffer_->ready(tensor, reinterpret_cast<std::byte*>(address));
  }
  void finish() { buffer_->finish(check_signals); }
  std::vector<std::vector<std::size_t>> buckets() const {
    std::vector<std::vector<std::size_t>> tensors;
    for (const auto& bucket : buffer_->plan().buckets()) tensors.push_back(bucket.tensors);
    return tensors;
  }

 private:
  nb::object submit_;  // outlives the buffer, whose destructor runs without the GIL
  std::unique_ptr<FusionBuffer> buffer_;
};
}  // namespace

void bind_group(nb::module_& m) {
  m.def(
      "give_back_pages",
      [](std::uintptr_t data, std::size_t nbytes) {
        give_back_pages(reinterpret_cast<std::byte*>(data), nbytes);
      },
      "data"_a, "nbytes"_a,
      "Frees whole pages of registered memory, for all who map it; they are zeros until written.");
  m.def(
      "written_pages",
      [](std::uintptr_t view, std::size_t nbytes) {
        return written_pages(reinterpret_cast<const std::byte*>(view), nbytes);
      },
      no_gil, "view"_a, "nbytes"_a,
      "[(start, stop)] in bytes of the pages that this process has written in a view, which no "
      "longer show what is written into the memory.");
  m.def(
      "drop_pages",
      [](std::uintptr_t view, std::size_t nbytes) {
        drop_pages(reinterpret_cast<std::byte*>(view), nbytes);
      },
      "view"_a, "nbytes"_a, "Lets pages of a view show the memory again.");
  m.def(
      "api", [] { return reinterpret_cast<std::uintptr_t>(api()); },
      "Address of the functions of sdp_api.h.");
  m.def(
      "make_endpoint",
      [](nb::object submit) {
        // Neither `submit` nor the endpoint is ever freed, see SdpEndpoint.
        return reinterpret_cast<std::uintptr_t>(new SdpEndpoint{calling(submit.release())});
      },
      "submit"_a, "An SdpEndpoint of a group whose operations are not the native group's own.");

  nb::class_<NativeGroup>(m, "NativeGroup", "The ranks of a group on this node.")
      .def(nb::init<int, int, std::vector<int>, std::vector<int>, std::vector<int>, std::size_t,
                    int, std::vector<int>, int, std::uint64_t, std::vector<int>, int>(),
           "rank"_a, "world_size"_a, "segment_fds"_a, "sockets"_a, "pidfds"_a, "staging_bytes"_a,
           "spin_us"_a = -1, "ids"_a = std::vector<int>(), "group_size"_a = 0, "token"_a = 0,
           "global_ranks"_a = std::vector<int>(), "threads"_a = 1,
           "Takes ownership of all file descriptors, also if it raises. `ids`: the ranks' places, "
           "where they are one node's share of a group of `group_size`. `global_ranks`: by which "
           "messages call the group's ranks, if not by these. `threads`: that share large "
           "operations.")
      .def("run", &NativeGroup::run, no_gil, "request"_a, "Blocks until the collective is done.")
      .def("submit", &NativeGroup::submit, no_gil, "request"_a,
           "Queues a collective, or posts a send or a receive.")
      .def(
          "submit_at_flags", &NativeGroup::submit_at_flags, no_gil, "request"_a, "flags"_a,
          "Queues an all_reduce of each piece of the request, with (ready, done, value): it starts "
          "when the word at `ready` has come to `value`, and stores that at `done` at its end. "
          "Words and memory are borrowed until the last is done, whose Work this is.")
      .def("check_peers", &NativeGroup::check_peers, no_gil, "operation"_a,
           "last_completed"_a.none(), "elapsed_s"_a,
           "Raises if a rank here has failed or ended, without waiting.")
      .def("set_waiting_remote", &NativeGroup::set_waiting_remote, "waits"_a,
           "Says whether this rank waits for one of another node; those here are patient then.")
      .def("fail", &NativeGroup::fail, "failure"_a,
           "Fails the group for a reason found elsewhere; the first one stays.")
      .def("take_back", &NativeGroup::take_back, no_gil, "work"_a,
           "Ends a receive that no message has come for: its work is the caller's to finish. The "
           "ticket of its record; None if a message has come.")
      .def("others_have_left", &NativeGroup::others_have_left, no_gil,
           "Says that no rank of another node sends any more.")
      .def("ended", &NativeGroup::ended, "The ranks of this node whose processes have ended.")
      .def("gone", &NativeGroup::gone, "The ranks of this node that have ended or left.")
      .def("add_region", &NativeGroup::add_region, "address"_a, "nbytes"_a, "fd"_a, "offset"_a,
           "Offers a shared mapping to the peers; returns its id. The fd is duplicated.")
      .def("remove_region", &NativeGroup::remove_region, "region"_a)
      .def("allocate", &NativeGroup::allocate, "nbytes"_a, "with_view"_a = false,
           "(address, view, region) of zero-filled memory that peers can map; until `free`. The "
           "view, 0 if none is wanted, is copy on write: see written_pages().")
      .def("free", &NativeGroup::free, "region"_a)
      .def("map_region", &NativeGroup::map_region, "rank"_a, "region"_a,
           "(address, view, owner) of a region that a rank of this node has added; None if it is "
           "not known here. It stays mapped as long as the owner lives.")
      .def("abort", &NativeGroup::abort, "reason"_a)
      .def("failure", &NativeGroup::failure, nb::sig("def failure(self) -> BaseException | None"),
           "Why the group is unusable, or None.")
      .def_prop_ro("failed", &NativeGroup::failed, "Whether it is.")
      .def("raise_if_failed", &NativeGroup::raise_if_failed)
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
      .def("set_rank_info", &NativeGroup::set_rank_info, "text"_a,
           "Replaces the text about this rank, see `initialize_segment`.")
      .def_prop_ro("error_prefix", &NativeGroup::error_prefix, "How messages begin: `[rank 3/8] `.")
      .def("set_error_prefix", &NativeGroup::set_error_prefix, "text"_a, "Changes it.")
      .def("show_forming", &NativeGroup::show_forming, "text"_a, "since_ns"_a,
           "Shows that this process is making another group, since when; 0: none.")
      .def("flight", &NativeGroup::flight, "rank"_a,
           "What a rank of this node shows of itself and its last operations: see FlightHead.")
      .def("counters", &NativeGroup::counters, "rank"_a,
           "What a rank of this node has counted: see FlightCounters.")
      .def("close", &NativeGroup::close, no_gil)
      .def(
          "endpoint",
          [](const NativeGroup& group) {
            return reinterpret_cast<std::uintptr_t>(make_endpoint(group.engine()));
          },
          "A new SdpEndpoint, which is never freed.")
      .def(
          "explain",
          [](const NativeGroup&, Op op, std::size_t nbytes, bool registered) {
            return explain(op, nbytes, registered);
          },
          "op"_a, "nbytes"_a, "registered"_a, "See the function of this name.")
      .def_prop_ro("issued", &NativeGroup::issued)
      .def_prop_ro("last_path", &NativeGroup::last_path);

  nb::class_<NativeFusionBuffer>(m, "NativeFusionBuffer", "Balanced fusion buffers.")
      .def(nb::init<const NativeGroup&, const std::vector<std::pair<std::uint64_t, DType>>&,
                    std::size_t, ReduceOp, double, nb::object>(),
           "group"_a, "tensors"_a, "threshold_bytes"_a, "op"_a, "timeout_s"_a,
           "submit"_a = nb::none(),
           "`submit`: takes the buffers' operations, where they are not the native group's own.")
      .def("ready", &NativeFusionBuffer::ready, no_gil, "tensor"_a, "address"_a)
      .def("finish", &NativeFusionBuffer::finish, no_gil)
      .def("buckets", &NativeFusionBuffer::buckets, "Indices of the tensors in each buffer.");
}
}  // namespace sdp
