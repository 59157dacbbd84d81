#include "run_record.hpp"

#include "request.hpp"
#include "work.hpp"

namespace sdp {

QueuedRun QueuedRun::record(Flight& flight, const Request& request, std::uint64_t seq) {
  TraceEvent event = TraceEvent::of(request);
  event.seq = seq;
  event.flags |= TraceEvent::kAsync;
  QueuedRun queued{flight.reserve(request.part.has_value()), seq};
  flight.write(event, queued.ticket);
  return queued;
}

RunRecord::RunRecord(Flight& flight, Trace& trace, const Request& request, const Work* work,
                     QueuedRun queued)
    : flight_(flight),
      trace_(trace),
      work_(work),
      ticket_(queued.ticket),
      event_(TraceEvent::of(request)),
      recorded_(flight.on()),
      traced_(trace.on()) {
  event_.seq = queued.seq;
  if (work != nullptr) event_.flags |= TraceEvent::kAsync;
  event_.thread = flight.this_thread();
  event_.started_ns = now_ns();
  if (event_.issued_ns == 0) event_.issued_ns = event_.started_ns;  // it was not queued
}

void RunRecord::begin(std::uint64_t seq) {
  begun_ = true;
  event_.seq = seq;
  if (recorded_) flight_.write(event_, ticket_);
}

void RunRecord::fail(const Failure& failure) {
  event_.flags |= TraceEvent::kFailed;
  event_.blamed = failure.ranks.empty() ? -1 : failure.ranks[0];
}

void RunRecord::end() {
  // An operation that has not begun was queued when its group failed or was closed.
  if (ended_ || (!begun_ && ticket_ == 0)) return;
  ended_ = true;
  if (!recorded_ && !traced_) return;
  if (!begun_) event_.flags |= TraceEvent::kFailed;
  event_.finished_ns = now_ns();
  // An operation that has not begun is still recorded as queued: write all of it.
  begun_ ? flight_.end(event_, ticket_) : flight_.write(event_, ticket_);
  if (!traced_ || !begun_) return;
  if (work_ == nullptr) {
    event_.waited_ns = event_.issued_ns;
    event_.waiter = event_.thread;
  } else {
    const Work::Waiter waiter = work_->waiter();
    event_.waited_ns = waiter.since_ns;
    event_.waiter = waiter.thread;
  }
  trace_.add(event_);
}
}  // namespace sdp
