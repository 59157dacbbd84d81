#include <array>
#include <string_view>

#include "bindings.hpp"
#include "completion_signal.hpp"
#include "work.hpp"

namespace sdp {
namespace {
// As tuples, in which form messages between nodes carry a signature.
using SignatureFields =
    std::tuple<std::uint8_t, std::uint8_t, std::uint8_t, std::int32_t, std::int32_t, std::uint32_t,
               std::uint32_t, std::uint64_t, std::uint64_t>;

SignatureFields fields_of(const OpSignature& signature) {
  const auto& [op, dtype, reduce_op, root, peer, tag, layout, count, seq] = signature;
  return {static_cast<std::uint8_t>(op),
          static_cast<std::uint8_t>(dtype),
          static_cast<std::uint8_t>(reduce_op),
          root,
          peer,
          tag,
          layout,
          count,
          seq};
}

OpSignature signature_of(const SignatureFields& fields) {
  const auto& [op, dtype, reduce_op, root, peer, tag, layout, count, seq] = fields;
  return {static_cast<Op>(op),
          static_cast<DType>(dtype),
          static_cast<ReduceOp>(reduce_op),
          root,
          peer,
          tag,
          layout,
          count,
          seq};
}

// Replaces invalid bytes: a part of the text may come from a peer's memory.
nb::object decoded(std::string_view text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void bind_signature(nb::module_& m) {
  nb::class_<OpSignature>(m, "OpSignature", "What identifies an operation in messages.")
      .def_static("of", &signature_of, "fields"_a,
                  "Of what `fields` has returned, here or on another node.")
      .def_prop_ro("fields", &fields_of)
      .def_prop_ro("number", &OpSignature::number, "Such as `all_reduce #7`.")
      .def(
          "title",
          [](const OpSignature& signature, std::vector<int> global_ranks) {
            return signature.title(RankNames(std::move(global_ranks)));
          },
          "global_ranks"_a = std::vector<int>(), "Such as `all_reduce #7 float32[25] sum`.")
      .def(
          "with_global_ranks",
          [](const OpSignature& signature, std::vector<int> global_ranks) {
            return signature.with_global_ranks(RankNames(std::move(global_ranks)));
          },
          "global_ranks"_a, "The same, with root and peer as the job numbers them.");
}

void bind_failure(nb::module_& m) {
  nb::class_<Failure>(m, "Failure", "A failure as fields, and its text once it is composed.")
      .def(
          "__init__",
          [](Failure* self, const std::string& kind, std::string cause, std::vector<int> ranks,
             bool across_nodes) {
            const FailureKind found = failure_kind(kind);
            new (self) Failure(found, std::move(cause), std::move(ranks),
                               default_hint(found, across_nodes));
          },
          "kind"_a, "cause"_a, "ranks"_a, "across_nodes"_a = false,
          "`across_nodes`: whether its hint is that of failures between nodes.")
      .def_prop_ro("kind", [](const Failure& failure) { return name(failure.kind); })
      .def_prop_ro(
          "cause", [](const Failure& failure) { return decoded(failure.cause); },
          nb::sig("def cause(self) -> str"))
      .def_prop_ro(
          "summary", [](const Failure& failure) { return decoded(failure.summary()); },
          nb::sig("def summary(self) -> str"))
      .def_prop_ro(
          "text", [](const Failure& failure) { return decoded(failure.what()); },
          nb::sig("def text(self) -> str"))
      .def_ro("ranks", &Failure::ranks)
      .def_rw("origin_rank", &Failure::origin_rank, "-1: this rank.")
      .def_rw("origin_name", &Failure::origin_name)
      .def_ro("global_ranks", &Failure::global_ranks)
      .def_ro("global_origin_rank", &Failure::global_origin_rank)
      .def_rw("is_repeat", &Failure::is_repeat)
      .def_rw("op", &Failure::op)
      .def_rw("seq", &Failure::seq)
      .def_rw("elapsed_s", &Failure::elapsed_s)
      .def_rw("operation", &Failure::operation)
      .def_rw("origin_operation", &Failure::origin_operation)
      .def_rw("group", &Failure::group, "Token of the group that has failed by it; 0: none has.")
      .def(
          "happened_in",
          [](Failure& failure, const OpSignature& operation,
             const std::optional<OpSignature>& last_completed, double elapsed_s) {
            failure.in(operation, last_completed.value_or(OpSignature{}), elapsed_s);
          },
          "operation"_a, "last_completed"_a.none(), "elapsed_s"_a)
      .def(
          "compose",
          [](Failure& failure, const std::string& error_prefix, int rank,
             std::vector<int> global_ranks) {
            failure.compose(error_prefix, RankNames(std::move(global_ranks)), rank);
          },
          "error_prefix"_a, "rank"_a, "global_ranks"_a = std::vector<int>(),
          "Makes the text of the fields, as rank `rank` words it.")
      .def(
          "set_text",
          [](Failure& failure, std::string summary, std::string text, std::vector<int> global_ranks,
             int global_origin_rank) {
            failure.set_text(std::move(summary), std::move(text));
            failure.global_ranks = std::move(global_ranks);
            failure.global_origin_rank = global_origin_rank;
          },
          "summary"_a, "text"_a, "global_ranks"_a, "global_origin_rank"_a,
          "Takes over a text that was composed elsewhere.");
}

// Observers add to the error which rank waited for which. Their exceptions must not hide the error.
void tell_observers(const nb::object& error, std::uint64_t group) {
  try {
    const nb::module_ open_groups = nb::module_::import_("sdp_plugins.core.open_groups");
    open_groups.attr("open_groups").attr("group_failed")(group, error);
  } catch (nb::python_error& other) {
    if (!other.matches(PyExc_Exception)) throw;
  }
}
}  // namespace

nb::object as_exception(const Failure& failure, bool is_raised) {
  Failure whole = failure;
  whole.compose("", RankNames(), failure.origin_rank);  // unless the group has composed it
  nb::object error = nb::module_::import_("sdp_plugins.core.errors").attr("from_native")(whole);
  if (is_raised && failure.group != 0) tell_observers(error, failure.group);
  return error;
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    try {
      const nb::object error = as_exception(failure, true);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error& other) {
      other.restore();  // a signal arrived meanwhile, such as the Ctrl-C that ended the peer
    }
  } catch (const Interrupted& interrupted) {
    try {
      std::rethrow_exception(interrupted.cause);
    } catch (nb::python_error& error) {
      error.restore();
    }
  }
}

void bind_failures(nb::module_& m) {
  bind_signature(m);
  bind_failure(m);
  nb::class_<Work>(m, "Work", "A handle on an operation that an engine will finish.")
      .def(nb::init<>())
      .def(
          "finish", [](Work& work, int source_rank) { work.finish(std::nullopt, source_rank); },
          no_gil, "source_rank"_a = -1, "Done; called once, by whoever ran the operation.")
      .def(
          "fail", [](Work& work, const Failure& failure) { work.finish(failure); }, no_gil,
          "failure"_a, "Done, with a failure.")
      .def(
          "wait", [](Work& work, double timeout_s) { return work.wait(timeout_s, check_signals); },
          no_gil, "timeout_s"_a,
          "True when done, False after the time-out; raises the operation's failure.")
      .def("completed", &Work::completed)
      .def(
          "failure",
          [](const Work& work) -> nb::object {
            const auto failure = work.failure();
            return failure ? as_exception(*failure, false) : nb::none();
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
  nb::class_<CompletionSignal>(m, "CompletionSignal", "Tells one thread that works are done.")
      .def(nb::init<>())
      .def("set", &CompletionSignal::set)
      .def("set_after", &CompletionSignal::set_after, "work"_a,
           "Sets it once the work is done, which may be now; takes no GIL for that.")
      .def("wait", &CompletionSignal::wait, no_gil, "Waits until it is set, and clears it.");
}
}  // namespace sdp
