// The record of a running operation: written to the flight recorder from its beginning on, and to
// the trace, if tracing is on, at its end.
#pragma once

#include "flight.hpp"
#include "trace.hpp"

namespace sdp {
class Failure;
class Work;
struct Request;

// The record of an operation that is queued behind others.
struct QueuedRun {
  EventRing::Ticket ticket = 0;
  std::uint64_t seq = 0;
  // Called with the engine's lock held.
  static QueuedRun record(Flight& flight, const Request& request, std::uint64_t seq);
};

class RunRecord {
 public:
  // `work`: its handle; null: its caller runs it and has none.
  RunRecord(Flight& flight, Trace& trace, const Request& request, const Work* work,
            QueuedRun queued = {});
  ~RunRecord() { end(); }
  RunRecord(const RunRecord&) = delete;
  RunRecord& operator=(const RunRecord&) = delete;

  void begin(std::uint64_t seq);
  void fail(const Failure& failure);
  void end();
  void set_path(std::uint8_t path) { event_.path = path; }
  double started_s() const { return 1e-9 * static_cast<double>(event_.started_ns); }
  TraceEvent* traced() { return traced_ ? &event_ : nullptr; }

 private:
  Flight& flight_;
  Trace& trace_;
  const Work* work_;
  EventRing::Ticket ticket_;
  TraceEvent event_;
  const bool recorded_, traced_;
  bool begun_ = false, ended_ = false;
};
}  // namespace sdp
