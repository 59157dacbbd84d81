#include "error.hpp"

#include <cstdio>

namespace sdp {

const char* name(FailureKind kind) {
  switch (kind) {
    case FailureKind::peer_lost:
      return "peer_lost";
    case FailureKind::timeout:
      return "timeout";
    case FailureKind::mismatch:
      return "mismatch";
    case FailureKind::shared_memory:
      return "shared_memory";
    case FailureKind::aborted:
      return "aborted";
    case FailureKind::closed:
      return "closed";
    case FailureKind::interrupted:
      return "interrupted";
  }
  return "closed";
}

FailureKind failure_kind(const std::string& name) {
  for (auto kind : {FailureKind::peer_lost, FailureKind::timeout, FailureKind::mismatch,
                    FailureKind::shared_memory, FailureKind::aborted, FailureKind::closed}) {
    if (name == sdp::name(kind)) return kind;
  }
  throw std::invalid_argument("no group fails by '" + name + "'");
}

const char* hint(FailureKind kind) {
  switch (kind) {
    case FailureKind::peer_lost:
      return " Hint: look for that rank's own error or traceback; the kernel's log tells of "
             "out-of-memory kills; if it has neither, it had less to do than this one.";
    case FailureKind::timeout:
      return " Hint: that rank is stopped, still computing, or took another path through the "
             "program; if it is only slow, raise the group's timeout (SDP_TIMEOUT_S, unless the "
             "program gives one).";
    case FailureKind::mismatch:
      return " Hint: all ranks must call the same operations in the same order, with the same "
             "types and sizes, and fusion buffers of the same tensors.";
    case FailureKind::aborted:
      return " Hint: look for the error of the rank that aborted.";
    default:
      return "";
  }
}

Failure forked(const std::string& head) {
  return {FailureKind::closed,
          head +
              "this process was forked from the one that owns the group. Hint: use the group in "
              "its own process only; data loader workers must not communicate."};
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (first > 0) text += ", ";
    text += std::to_string(ranks[first]);
    if (last == first + 1) last = first;  // "4, 5" reads better than "4-5"
    if (last > first) text.append("-").append(std::to_string(ranks[last]));
    first = last + 1;
  }
  return text;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g s", value);
  return text;
}
}  // namespace sdp
