#include "bindings.hpp"
#include "flight_reader.hpp"
#include "peers.hpp"
#include "report_signal.hpp"
#include "trace.hpp"

namespace sdp {

void bind_flight(nb::module_& m) {
  m.attr("TRACE_EVENTS") = Trace::kEvents;
  m.def("initialize_segment", &initialize_segment, "fd"_a, "rank"_a, "world_size"_a,
        "staging_bytes"_a, "error_prefix"_a = "",
        "Sizes a memory file and writes its header, before the rendezvous; returns where its text "
        "about the rank goes, of at most FLIGHT_RANK_INFO_BYTES with the 0 that ends it.");
  m.attr("FLIGHT_RANK_INFO_BYTES") = FlightArea::kRankInfoBytes;
  m.attr("FLIGHT_FORMING_BYTES") = FlightForming::kTextBytes;
  m.attr("FLIGHT_SLOTS") =
      std::make_tuple(FlightRings::kOperations, FlightRings::kMessages, FlightRings::kSteps);
  m.def(
      "read_flight", [](int fd) { return as_bytes(read_flight(fd)); }, "fd"_a,
      "`NativeGroup.flight` of a segment's file, of which nothing is believed.");
  m.def(
      "take_report_signal", &take_report_signal, "number"_a, "eventfd"_a,
      "Has a signal written to the descriptor, if nobody else handles or ignores it; whether so.");
  m.def("give_back_report_signal", &give_back_report_signal, "number"_a,
        "Undoes that, unless somebody else has taken the signal since.");
}
}  // namespace sdp
