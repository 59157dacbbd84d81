// The one exception of the core: what failed, who is to blame, and the text that a user reads.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace sdp {

enum class FailureKind : std::uint32_t {
  peer_lost,      // a peer's process ended, or left the group while it was needed
  timeout,        // a peer is alive but did not come before the deadline
  mismatch,       // peers called something else, or with another shape, type or root
  shared_memory,  // a mapping could not be made
  aborted,        // a peer's caller aborted the group
  closed,         // this process closed the group, or does not own it (forked child)
  interrupted,    // a signal handler of the caller raised while it waited
};

const char* name(FailureKind kind);
FailureKind failure_kind(const std::string& name);  // throws std::invalid_argument
const char* hint(FailureKind kind);                 // " Hint: ...", the remedy; or ""

// Copyable, so that one failure can be given to every pending Work.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, std::string text, std::vector<int> ranks = {}, std::string op = {},
          std::uint64_t seq = 0, double elapsed_s = 0)
      : std::runtime_error(std::move(text)),
        kind(kind),
        ranks(std::move(ranks)),
        op(std::move(op)),
        seq(seq),
        elapsed_s(elapsed_s) {}

  FailureKind kind;
  std::vector<int> ranks;  // those to blame
  std::string op;
  std::uint64_t seq;
  double elapsed_s;
  std::uint64_t group = 0;  // token of the group that has failed by this; 0: none has
};

Failure forked(const std::string& head);  // use of a group in a child of its process

// A signal handler of the caller raised while it waited: carried through the core unchanged.
struct Interrupted {
  std::exception_ptr cause;
};

// "rank 3", "ranks 1, 4-6"
std::string rank_list(const std::vector<int>& ranks);
std::string seconds(double value);  // "1.5 s"
}  // namespace sdp
