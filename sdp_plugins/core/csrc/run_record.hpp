// The record of an operation while it runs: the flight recorder has it from its beginning on, a
// trace, if there is one, from its end.
#pragma once

#include "flight.hpp"
#include "trace.hpp"

namespace sdp {
class Failure;
class Work;
struct Request;

// An operation that has a place in the record before it runs: it waits for others to be done.
struct QueuedRun {
  EventRing::Ticket ticket = 0;
  std::uint64_t seq = 0;
  // With the engine's lock held.
  static QueuedRun record(Flight& flight, const Request& request, std::uint64_t seq);
};

class RunRecord {
 public:
  // `work`: its handle; null: its caller runs it.
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
