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

// A piece of memory is its address and number of elements.
template <>
struct nanobind::detail::type_caster<sdp::Piece> {
  using Pair = std::pair<std::uintptr_t, std::uint64_t>;
  NB_TYPE_CASTER(sdp::Piece, make_caster<Pair>::Name)

  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Pair> caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    const auto [address, count] = static_cast<Pair>(caster);
    value = {reinterpret_cast<std::byte*>(address), count};
    return true;
  }
  static handle from_cpp(const sdp::Piece& piece, rv_policy policy,
                         cleanup_list* cleanup) noexcept {
    const Pair pair{reinterpret_cast<std::uintptr_t>(piece.data), piece.count};
    return make_caster<Pair>::from_cpp(pair, policy, cleanup);
  }
};

namespace sdp {
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
void bind_requests(nb::module_& m);
void bind_reductions(nb::module_& m);
void bind_group(nb::module_& m);
void bind_flight(nb::module_& m);
}  // namespace sdp
