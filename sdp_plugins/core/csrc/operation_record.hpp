// The record of one operation: in the flight recorder from its issue on, and in the trace, if
// tracing is on, from its end on.
#pragma once

#include "flight.hpp"
#include "trace.hpp"

namespace sdp {
class Failure;
class Work;
struct Request;

class OperationRecord {
 public:
  // `seq`: the operation's number, unless it is a step of a larger group's operation. `work`: its
  // handle (borrowed); null: its caller runs it and has none.
  OperationRecord(Flight& flight, Trace& trace, const Request& request, std::uint64_t seq,
                  const Work* work);

  void issue();  // shows it as queued
  void begin();  // shows that it runs; called again, does nothing
  void end(const Failure* failure = nullptr);
  double issued_s() const { return 1e-9 * static_cast<double>(event.issued_ns); }
  double started_s() const { return 1e-9 * static_cast<double>(event.started_ns); }
  bool on() const { return flight_->on() || trace_->on(); }
  EventRing::Ticket ticket() const { return ticket_; }

  TraceEvent event;
  std::int64_t first_arrival_ns = 0;  // when the first rank of this node began it; 0: unknown

 private:
  Flight* flight_;
  Trace* trace_;
  const Work* work_;
  EventRing::Ticket ticket_ = 0;
};
}  // namespace sdp
