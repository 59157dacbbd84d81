#include "operation_record.hpp"

#include "request.hpp"
#include "work.hpp"

namespace sdp {

OperationRecord::OperationRecord(Flight& flight, Trace& trace, const Request& request,
                                 std::uint64_t seq, const Work* work)
    : event(TraceEvent::of(request)), flight_(&flight), trace_(&trace), work_(work) {
  event.seq = request.part ? request.part->operation.seq : seq;
  event.issued_ns = now_ns();
  if (work != nullptr) event.flags |= TraceEvent::kAsync;
}

void OperationRecord::issue() {
  flight_->write(event, ticket_);
}

void OperationRecord::begin() {
  if (event.started_ns != 0) return;
  event.started_ns = work_ == nullptr ? event.issued_ns : now_ns();
  event.thread = flight_->this_thread();
  flight_->write(event, ticket_);
}

void OperationRecord::end(const Failure* failure) {
  if (failure != nullptr) {
    event.flags |= TraceEvent::kFailed;
    event.blamed = failure->ranks.empty() ? -1 : failure->ranks[0];
  }
  if (!on()) return;
  event.finished_ns = now_ns();
  const bool has_run = event.started_ns != 0;  // else it failed in the queue
  if (!has_run) event.started_ns = event.finished_ns;
  event.thread = flight_->this_thread();
  flight_->write(event, ticket_);
  if (failure == nullptr) flight_->count(event, first_arrival_ns);
  if (!has_run || !trace_->on()) return;
  const Work::Waiter caller{event.issued_ns, event.thread};
  const Work::Waiter waiter = work_ == nullptr ? caller : work_->waiter();
  event.waited_ns = waiter.since_ns;
  event.waiter = waiter.thread;
  trace_->add(event);
}
}  // namespace sdp
