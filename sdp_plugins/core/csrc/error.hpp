// The exception of the core: a failure as fields, and the text that a user reads, which
// `Failure::compose` composes from them once. No code reads a field out of a text.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "op_signature.hpp"
#include "rank_names.hpp"

namespace sdp {

enum class FailureKind : std::uint32_t {
  peer_lost,      // a peer's process ended, or left the group while it was needed
  timeout,        // a peer is alive but did not arrive before the deadline
  mismatch,       // peers called another operation, or with another shape, type or root
  shared_memory,  // shared memory could not be created or mapped
  aborted,        // the program aborted the group on a peer
  closed,         // this process closed the group, or does not own it (forked child)
  interrupted,    // a signal handler raised while the caller waited
};
const char* name(FailureKind kind);
FailureKind failure_kind(std::string_view name);  // throws std::invalid_argument

// Remedies: the end of the text.
enum class Hint : std::uint32_t {
  none,
  lost_rank,
  lost_node,  // as `lost_rank`, between nodes
  late_rank,
  late_node,  // as `late_rank`, between nodes
  other_call,
  other_message,
  aborted_rank,
  other_ranks,
  new_group,
  new_group_after_signal,
  own_process,
  after_handler,
  compile_again,
  one_version,
  mapping_limits,
  open_files,
  open_files_or_no_register,
  file_size,
  memory_of_aborter,
  late_device,
};
const char* text(Hint hint);  // "" for an unknown value: a peer may have written it
Hint default_hint(FailureKind kind, bool across_nodes = false);

// Copyable, so that one failure can be given to every pending Work.
class Failure : public std::exception {
 public:
  Failure(FailureKind kind, std::string cause, std::vector<int> ranks = {}, Hint hint = Hint::none)
      : kind(kind), hint(hint), cause(std::move(cause)), ranks(std::move(ranks)) {}

  FailureKind kind;
  Hint hint;
  std::string cause;       // without the rest: "rank 2 did not arrive in 300 s"
  std::vector<int> ranks;  // those to blame
  int origin_rank = -1;    // that detected the failure first; -1: this rank
  bool is_repeat = false;  // another rank, or an earlier call, has raised this failure
  std::string op;          // name of the operation; also names beyond `Op`, such as "rendezvous"
  std::uint64_t seq = 0;
  double elapsed_s = 0;
  std::optional<OpSignature> operation;         // that failed here
  std::optional<OpSignature> origin_operation;  // that failed at the origin; with global ranks
  OpSignature last_completed;                   // on this rank; only its number is used
  std::string origin_name;                      // name of the origin if it is not a rank
  // The same ranks by their numbers in the job; set when the text is composed.
  std::vector<int> global_ranks;
  int global_origin_rank = -1;
  std::uint64_t group = 0;  // token of the group that failed; 0: none did

  Failure& in(const OpSignature& failed, const OpSignature& last, double elapsed);
  Failure& in(std::string_view operation_name);  // of one beyond `Op`
  // Composes the text if there is none. `error_prefix`: "[rank 3/8] "; `rank`: this rank.
  Failure& compose(const std::string& error_prefix, const RankNames& names, int rank);
  // Sets a text that was composed elsewhere.
  Failure& set_text(std::string summary, std::string whole);
  const std::string& summary() const { return summary_; }  // up to the cause
  const char* what() const noexcept override;

 private:
  std::string summary_, text_;
};

Failure forked();  // use of a group in a child of its process

// A signal handler of the caller raised while it waited: carried through the core unchanged.
struct Interrupted {
  std::exception_ptr cause;
};

std::string seconds(double value);  // "1.5 s"
}  // namespace sdp
