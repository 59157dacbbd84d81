// One collective while it runs on this rank: announces it, compares the announcements of all ranks,
// and moves all ranks through its rounds in lockstep. Every wait has a deadline and watches the
// peers.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helper_threads.hpp"
#include "memory_regions.hpp"
#include "operation_record.hpp"
#include "path_choice.hpp"
#include "peers.hpp"
#include "request.hpp"
#include "spin_wait.hpp"

namespace sdp {

// How the executing thread waits.
struct Patience {
  SpinPolicy spin;
  std::function<void()> interrupt;  // called periodically; throws to give up (signals, closing)
};

class Operation {
 public:
  struct Context {
    Peers& peers;
    Regions& regions;
    const Patience& patience;
    HelperThreads& helpers;
    const OpSignature& last_completed;
    OperationRecord& record;  // of this operation
  };
  // `step`: this rank's step counter, equal on all ranks between operations; advanced here.
  Operation(const Context& context, const Request& request, std::uint64_t seq, std::uint32_t& step);

  const Request& request() const { return request_; }
  const Peers& peers() const { return context_.peers; }
  int rank() const { return context_.peers.rank(); }
  int world_size() const { return context_.peers.world_size(); }
  int id(int rank) const { return context_.peers.id(rank); }  // its number in failures
  const RankNames& names() const { return context_.peers.names(); }
  std::size_t itemsize() const { return itemsize_; }
  Regions& regions() const { return context_.regions; }
  const Segment& segment(int rank) const { return context_.peers.segment(rank); }
  const Segment& own() const { return context_.peers.own(); }
  std::size_t slot_bytes() const { return context_.peers.layout().slot_bytes(); }
  const Announcement& announced(int rank) const { return segment(rank).announcement(seq_); }
  std::uint64_t seq() const { return seq_; }
  std::uint64_t shown_seq() const { return request_.part ? request_.part->operation.seq : seq_; }
  // For messages; if this is a part of a larger operation, the signature of that one.
  OpSignature signature() const;
  std::vector<double> factors() const;  // of all ranks, for PREMUL_SUM

  Announcement announcement() const;  // the fields that all collectives announce
  // Adds the places of the pieces if all lie in registered memory, in at most `kMostRuns` runs.
  void announce_memory(Announcement& announcement, std::span<const Piece> pieces) const;
  // Announces this operation, waits for all ranks, and throws Failure(mismatch) unless they agree.
  void arrive(Announcement announcement);
  // Where the `count` elements of registered memory that a peer has announced lie in this process.
  std::vector<Piece> memory_of(int rank, std::uint64_t count,
                               std::size_t most_runs = kMostRuns) const;
  // Reads or writes peers' registered memory. Throws the failure of a rank that has given up or
  // closed the group, because its program may use that memory again. See `Peers::await_access`.
  template <class Access>
  void access_peer_memory(Access&& access) {
    const PeerMemoryAccess announced(context_.peers);
    for (int r = 0; r < world_size(); ++r) {
      if (r == rank() || context_.peers.state(r) == PeerState::open) continue;
      if (const auto cause = context_.peers.gave_up(r)) fail(*cause);
    }
    access();
  }

  // Calls `work` for ranges of `count` elements, in as many threads as the group has.
  void divide(std::size_t count, const std::function<void(Range)>& work) const {
    const SpinPolicy& spin = context_.patience.spin;  // threads wait as the one that runs this
    context_.helpers.divide(count, itemsize_, work, spin.pause_us + spin.yield_us);
  }

  // Runs phases over `rounds` rounds: in stage i, phase p works on round i - p. All ranks
  // synchronize between stages. Phase 0 needs no data of its stage from peers, so it runs before
  // the wait. A slot that phase 0 fills in round i is free again in round i + kSlots.
  template <class... Phase>
  void lockstep(std::size_t rounds, Phase&&... phases) {
    const std::size_t stages = rounds == 0 ? 0 : rounds + sizeof...(phases) - 1;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      std::size_t lag = 0;
      const auto turn = [&](auto& phase) {
        if (lag == 1) await(step_);
        if (stage >= lag && stage - lag < rounds) phase(stage - lag);
        ++lag;
      };
      (turn(phases), ...);
      publish();
    }
  }
  void publish();                  // completes one step
  void await(std::uint32_t step);  // until all ranks have published it
  void await_all() { await(step_); }

  [[noreturn]] void fail(FailureKind kind, const std::string& cause, std::vector<int> ranks) const;
  [[noreturn]] void fail(Failure failure) const;
  void set_path(Path path) { path_ = path; }
  Path path() const { return path_; }

 private:
  void await_rank(int rank, std::uint32_t step);
  void check_peers(std::uint32_t step) const;
  void compare_announcements() const;
  void check_withdrawn() const;
  void note_arrivals() const;
  void note_absence() const;
  double limit_s(std::uint32_t step) const;
  std::vector<int> missing(std::uint32_t step) const;
  std::vector<int> present(const std::vector<int>& missing) const;
  void time_out(std::uint32_t step) const;

  Context context_;
  const Request& request_;
  std::uint64_t seq_;
  std::uint32_t& step_;
  std::uint32_t arrival_step_;
  std::size_t itemsize_;
  double started_s_;
  Path path_ = Path::none;
};
}  // namespace sdp
