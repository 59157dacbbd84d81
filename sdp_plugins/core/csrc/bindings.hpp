// What the files of the Python module share; no others know Python. Everything that waits releases
// the GIL; no engine thread takes it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "error.hpp"
#include "request.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sdp {
using Pieces = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;  // addresses and counts
std::vector<Piece> as_pieces(const Pieces& pieces);
Pieces as_pairs(const std::vector<Piece>& pieces);
nb::bytes as_bytes(const std::vector<std::byte>& data);

// An SdpError. With what the flight recorder has to say, if it is going to be raised.
nb::object as_exception(const Failure& failure, bool is_raised);
void translate(const std::exception_ptr& thrown, void*);

// Gives up the GIL while it lives. A thread that asks for it back when the interpreter is ending is
// ended in the midst of that by Python before 3.14, which C++ does not survive: so it waits for the
// end of the process instead, as later versions do.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Lets Python's signal handlers run (Ctrl-C) while the caller waits. Python runs them on the main
// thread only; another one must not ask for the GIL, which ends it when the interpreter is ending.
void check_signals();

void bind_failures(nb::module_& m);
void bind_reductions(nb::module_& m);
void bind_group(nb::module_& m);
void bind_flight(nb::module_& m);
}  // namespace sdp
