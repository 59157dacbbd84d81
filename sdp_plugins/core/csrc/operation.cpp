#include "operation.hpp"

#include <algorithm>
#include <numeric>

#include "agreement.hpp"

namespace sdp {
Operation::Operation(const Context& context, const Request& request, std::uint64_t seq,
                     std::uint32_t& step)
    : context_(context),
      request_(request),
      seq_(seq),
      step_(step),
      arrival_step_(step + 1),
      itemsize_(sdp::itemsize(request.dtype)),
      started_s_(context.record.started_s()) {}

std::vector<double> Operation::factors() const {
  std::vector<double> all;
  if (request_.reduce_op == ReduceOp::premul_sum) {
    for (int r = 0; r < world_size(); ++r) all.push_back(announced(r).factor);
  }
  return all;
}

Announcement Operation::announcement() const {
  Announcement made{};
  made.seq = seq_;
  made.operation = request_.signature(shown_seq());
  made.factor = request_.factor;
  return made;
}

void Operation::arrive(Announcement announcement) {
  announcement.region_version = regions().version();
  if (context_.record.on()) announcement.arrived_ns = context_.record.event.started_ns;
  own().announcement(seq_) = announcement;
  publish();
  try {
    await_all();
  } catch (...) {
    if (context_.record.on()) note_absence();
    throw;
  }
  if (context_.record.on()) note_arrivals();
  compare_announcements();
  // In every operation: unmaps regions that peers have withdrawn, whichever operation runs next.
  for (int r = 0; r < world_size(); ++r) {
    if (r != rank()) regions().sync(r, announced(r).region_version);
  }
}

void Operation::announce_memory(Announcement& announcement, std::span<const Piece> pieces) const {
  Run* const runs = own().runs(seq_);
  std::size_t n = 0;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    const auto place = regions().find(piece.data, piece.count * itemsize_);
    if (!place) return;
    const bool follows = n > 0 && runs[n - 1].region == place->region &&
                         runs[n - 1].offset + runs[n - 1].count * itemsize_ == place->offset;
    if (follows) {
      runs[n - 1].count += piece.count;
    } else if (n < kMostRuns) {
      runs[n++] = {place->region, place->offset, piece.count};
    } else {
      return;
    }
  }
  announcement.runs = static_cast<std::uint16_t>(n);
}

// A peer that has failed since its announcement may have freed the memory: its failure is thrown.
std::vector<Piece> Operation::memory_of(int rank, std::uint64_t count,
                                        std::size_t most_runs) const {
  std::vector<Piece> memory;
  const std::size_t n = announced(rank).runs;
  std::uint64_t left = count;
  for (std::size_t i = 0; i < n && n <= most_runs; ++i) {
    const Run run = segment(rank).runs(seq_)[i];  // read once: the peer could change it at any time
    if (run.count > left) break;
    left -= run.count;
    memory.push_back(
        {regions().address(rank, {run.region, run.offset}, run.count * itemsize_), run.count});
    if (memory.back().data != nullptr) continue;
    check_peers(step_ + 1);
    fail(context_.peers.blame(FailureKind::mismatch, rank,
                              " announced memory that it has not registered", Hint::other_call));
  }
  if (left == 0 && memory.size() == n) return memory;
  fail(context_.peers.blame(FailureKind::mismatch, rank, " announced impossible pieces",
                            Hint::other_call));
}

// Exact, because all ranks of the node share one clock; unknown if a rank does not record.
void Operation::note_arrivals() const {
  TraceEvent& event = context_.record.event;
  std::int64_t first_ns = event.started_ns;
  for (int r = 0; r < world_size(); ++r) {
    const std::int64_t arrived_ns = announced(r).arrived_ns;
    if (arrived_ns <= 0) {
      event.arrived_ns = 0;
      event.last_rank = -1;
      return;
    }
    first_ns = std::min(first_ns, arrived_ns);
    if (arrived_ns <= event.arrived_ns) continue;
    event.arrived_ns = arrived_ns;
    event.last_rank = id(r);
  }
  context_.record.first_arrival_ns = first_ns;
}

// Records that the operation has waited until now.
void Operation::note_absence() const {
  const std::vector<int> absent = missing(step_);
  if (absent.empty()) return;  // all arrived, and one of them has failed
  context_.record.event.arrived_ns = now_ns();
  context_.record.event.last_rank = id(absent[0]);
}

void Operation::publish() {
  own().header().step.publish(++step_);
}

void Operation::await(std::uint32_t step) {
  for (int r = 0; r < world_size(); ++r) {
    if (!segment(r).header().step.reached(step)) await_rank(r, step);
  }
}

void Operation::await_rank(int rank, std::uint32_t step) {
  FutexCounter& counter = segment(rank).header().step;
  if (spin_until(counter, step, context_.patience.spin)) return;
  while (true) {
    const std::uint32_t seen = counter.value.load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(seen - step) >= 0) return;
    const double left_s = limit_s(step) - (now_s() - started_s_);
    counter.sleep(seen,
                  static_cast<std::uint32_t>(std::clamp(left_s * 1e6, 1.0, 1.0 * kPeerCheckUs)));
    if (counter.reached(step)) return;
    if (context_.patience.interrupt) context_.patience.interrupt();
    check_peers(step);
    if (now_s() - started_s_ > limit_s(step)) time_out(step);
  }
}

// Extends the deadline while all late ranks wait for other nodes: they are not to blame, and will
// learn which rank is.
double Operation::limit_s(std::uint32_t step) const {
  const double patience_s = request_.part ? request_.part->patience_s : 0;
  if (patience_s <= 0) return request_.timeout_s;
  const std::vector<int> late = missing(step);
  const bool wait_remote = std::all_of(late.begin(), late.end(), [&](int r) {
    return segment(r).header().waiting_remote.load() != 0;
  });
  return request_.timeout_s + (wait_remote ? patience_s : 0);
}

std::vector<int> Operation::missing(std::uint32_t step) const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size(); ++r) {
    if (!segment(r).header().step.reached(step)) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> Operation::present(const std::vector<int>& missing) const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size(); ++r) {
    if (std::find(missing.begin(), missing.end(), r) == missing.end()) ranks.push_back(r);
  }
  return ranks;
}

// A process that ended without a report is the root cause; a third rank's failure may be its
// consequence, and is checked second. A failed rank ends the wait even if it has published this
// step: the next operation would fail anyway.
void Operation::check_peers(std::uint32_t step) const {
  const Peers& peers = context_.peers;
  std::vector<int> lost = peers.crashed();
  std::erase_if(lost, [&](int r) { return segment(r).header().step.reached(step); });
  if (!lost.empty()) fail(peers.ended(lost));
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank()) continue;
    // Read before the counter: a rank that is done with this step may leave at any time.
    const auto cause = peers.gave_up(r);
    const bool failed = peers.state(r) == PeerState::failed;
    if (cause && (failed || !segment(r).header().step.reached(step))) fail(*cause);
  }
}

// If a rank's program has aborted or lost a peer after its announcement, throws that failure
// instead of the mismatch. (After a time-out or a mismatch the announcements are the cause.)
void Operation::check_withdrawn() const {
  for (int r = 0; r < world_size(); ++r) {
    if (r == rank() || context_.peers.state(r) != PeerState::failed) continue;
    const auto cause = context_.peers.gave_up(r);
    if (!cause) continue;  // it has overwritten its state
    if (cause->kind == FailureKind::aborted || cause->kind == FailureKind::peer_lost) fail(*cause);
  }
}

void Operation::time_out(std::uint32_t step) const {
  const std::vector<int> late = missing(step);
  if (late.empty()) return;  // the last one has just arrived
  const std::vector<int> ids = context_.peers.ids(late);
  std::string what = names().list(ids);
  what += step == arrival_step_ ? " did not arrive in " : " arrived, but stalled for ";
  what += seconds(request_.timeout_s);
  const Announcement& previous = segment(late[0]).announcement(seq_ - 1);
  if (step == arrival_step_ && !request_.part && seq_ > 1 && previous.seq + 1 == seq_) {
    what +=
        "; " + names().list({ids[0]}) + " last announced " + describe(previous.operation, names());
  }
  if (step == arrival_step_) {
    const Parties parties = disagreement(peers(), seq_, present(late));
    if (!parties.empty()) what += "; those that arrived disagree:" + describe(parties, names());
  }
  fail(FailureKind::timeout, what, ids);
}

void Operation::compare_announcements() const {
  std::vector<int> all(static_cast<std::size_t>(world_size()));  // every operation runs this
  std::iota(all.begin(), all.end(), 0);
  const Parties parties = disagreement(peers(), seq_, all);
  if (parties.empty()) return;
  check_withdrawn();
  fail(FailureKind::mismatch, "ranks disagree:" + describe(parties, names()), outvoted(parties));
}

OpSignature Operation::signature() const {
  return request_.part ? request_.part->operation : request_.signature(seq_);
}

void Operation::fail(FailureKind kind, const std::string& cause, std::vector<int> ranks) const {
  fail(Failure(kind, cause, std::move(ranks), default_hint(kind)));
}

void Operation::fail(Failure failure) const {
  const OpSignature& last = request_.part ? request_.part->last_completed : context_.last_completed;
  throw failure.in(signature(), last, now_s() - started_s_);
}
}  // namespace sdp
