#include "error.hpp"

#include <array>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace sdp {
namespace {
constexpr std::array<const char*, 7> kKinds{"peer_lost", "timeout", "mismatch",   "shared_memory",
                                            "aborted",   "closed",  "interrupted"};
// In the order of `Hint`.
constexpr std::array<const char*, 18> kHints{
    "",
    "read that rank's output for an error, and the kernel's log for an out-of-memory kill; without "
    "either, that rank called fewer operations than this one. Had it fewer batches? Pass "
    "drop_last=True, or use torch's DDP.join().",
    "read that rank's output for an error, and check that its node is up. Had it fewer batches? "
    "Pass drop_last=True, or use torch's DDP.join().",
    "that rank is stopped, still computing, or took another path through the program; if it is "
    "only slow, raise the group's timeout (SDP_TIMEOUT_S, unless the program passes one).",
    "that rank is stopped, still computing, or took another path through the program, or the "
    "network to its node is down; if it is only slow, raise the group's timeout (SDP_TIMEOUT_S, "
    "unless the program passes one).",
    "all ranks must call the same operations in the same order, with the same types and sizes, and "
    "fusion buffers of the same tensors.",
    "a receive needs the type and the number of elements of the send; use tags to tell messages "
    "apart.",
    "read the output of the rank that aborted.",
    "read the output of the other ranks.",
    "make a new group.",
    "the ranks may disagree on which operations completed; make a new group.",
    "use the group in its own process only; data loader workers must not communicate.",
    "set a flag in the handler and communicate after it.",
    "make a new group, and compile again the functions that used this one.",
    "use the same version of sdp_plugins and the same SDP_STAGING_BYTES on all ranks.",
    "check the memory limit of the container and vm.max_map_count.",
    "raise the limit on open files (ulimit -n), or call a collective between registrations, in "
    "which peers receive the files.",
    "raise the limit on open files (ulimit -n), or set SDP_REGISTER=0.",
};
static_assert(kHints.size() == static_cast<std::size_t>(Hint::open_files_or_no_register) + 1);
}  // namespace

const char* name(FailureKind kind) {
  const auto at = static_cast<std::size_t>(kind);
  return at < kKinds.size() ? kKinds[at] : "closed";
}

FailureKind failure_kind(std::string_view name) {
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (name == kKinds[i]) return static_cast<FailureKind>(i);
  }
  throw std::invalid_argument("no group fails by '" + std::string(name) + "'");
}

const char* text(Hint hint) {
  const auto at = static_cast<std::size_t>(hint);
  return at < kHints.size() ? kHints[at] : "";
}

Hint default_hint(FailureKind kind, bool across_nodes) {
  switch (kind) {
    case FailureKind::peer_lost:
      return across_nodes ? Hint::lost_node : Hint::lost_rank;
    case FailureKind::timeout:
      return across_nodes ? Hint::late_node : Hint::late_rank;
    case FailureKind::mismatch:
      return Hint::other_call;
    case FailureKind::aborted:
      return across_nodes ? Hint::other_ranks : Hint::aborted_rank;
    case FailureKind::closed:
      return Hint::new_group;
    case FailureKind::interrupted:
      return Hint::new_group_after_signal;
    default:
      return across_nodes ? Hint::other_ranks : Hint::none;
  }
}

Failure& Failure::in(const OpSignature& failed, const OpSignature& last, double elapsed) {
  operation = failed;
  op = name(failed.op);
  seq = failed.seq;
  last_completed = last;
  elapsed_s = elapsed;
  return *this;
}

Failure& Failure::compose(const std::string& error_prefix, const RankNames& names, int rank) {
  if (!text_.empty()) return *this;
  if (origin_rank < 0) origin_rank = rank;
  global_ranks = names.global_ranks(ranks);
  global_origin_rank = names.global_rank(origin_rank);
  summary_ = error_prefix;
  if (operation || !op.empty()) {
    summary_.append(operation ? operation->title(names) : op).append(": ");
  }
  if (origin_rank != rank || !origin_name.empty()) {
    summary_.append(origin_name.empty() ? names.list({origin_rank}) : origin_name);
    summary_ += " gave up: ";
    if (origin_operation) summary_.append(origin_operation->title(RankNames())).append(": ");
  }
  std::string_view shown = cause;
  const bool stops = shown.ends_with('.');
  if (stops) shown.remove_suffix(1);
  summary_ += shown;
  text_ = summary_;
  if (last_completed.is_numbered()) {
    text_.append(" (last completed: ").append(last_completed.number()).append(")");
  }
  // The reason of an abort may have its own hint.
  const std::string_view remedy = cause.find("Hint: ") == std::string::npos ? text(hint) : "";
  if (stops || operation || !remedy.empty()) text_ += ".";
  if (!remedy.empty()) text_.append(" Hint: ").append(remedy);
  return *this;
}

Failure& Failure::set_text(std::string summary, std::string whole) {
  summary_ = std::move(summary);
  text_ = std::move(whole);
  return *this;
}

const char* Failure::what() const noexcept {
  return text_.empty() ? cause.c_str() : text_.c_str();
}

Failure forked() {
  return {FailureKind::closed,
          "this process was forked from the one that owns the group",
          {},
          Hint::own_process};
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g s", value);
  return text;
}
}  // namespace sdp
