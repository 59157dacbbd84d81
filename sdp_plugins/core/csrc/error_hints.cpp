// What to do about a failure: the last sentence of its message.
#include <array>

#include "error.hpp"

namespace sdp {
namespace {
// In the order of `Hint`.
constexpr std::array<const char*, 21> kHints{
    "",
    "read that rank's output for an error, and the kernel's log for an out-of-memory kill; without "
    "either, that rank called fewer operations than this one: if it had fewer batches, pass "
    "drop_last=True; DDP has join() for it.",
    "read that rank's output for an error, and check that its node is up. If it had fewer batches, "
    "pass drop_last=True; DDP has join() for it.",
    "that rank is stopped, still computing, or took another path through the program; if it is "
    "only slow, raise the group's timeout (SDP_TIMEOUT_S, unless the program passes one).",
    "that rank is stopped, still computing, or took another path through the program, or the "
    "network to its node is down; if it is only slow, raise the group's timeout (SDP_TIMEOUT_S, "
    "unless the program passes one).",
    "all ranks must call the same operations in the same order, with the same types and sizes (and "
    "fusion buffers of the same tensors); look for a branch that depends on the rank or its data.",
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
    "raise the limit on the size of a file (ulimit -f).",
    "memory has run out on the rank that aborted: free some there, and make a new group.",
    "earlier work in that device's stream has not ended; look for a kernel that hangs or that "
    "waits "
    "for another rank. If it is only slow, raise the group's timeout (SDP_TIMEOUT_S, unless the "
    "program passes one).",
};
static_assert(kHints.size() == static_cast<std::size_t>(Hint::late_device) + 1);
}  // namespace

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
}  // namespace sdp
