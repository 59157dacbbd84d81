// Declarations that the files of the Python module share; only these files use Python. Every
// function that waits releases the GIL; no engine thread takes it.
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

// Converts a piece of memory to and from its address and number of elements.
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

// Makes an SdpError. If the error will be raised, observers such as the flight recorder add to it.
nb::object as_exception(const Failure& failure, bool is_raised);
void translate(const std::exception_ptr& thrown, void*);

// (address of `ready`, address of `done`, value)
using FlagAddresses = std::tuple<std::uintptr_t, std::uintptr_t, std::uint32_t>;
DeviceFlags flags_at(const FlagAddresses& addresses);

// Releases the GIL during its lifetime. Before 3.14, Python ends a thread that takes the GIL back
// while the interpreter shuts down, and C++ does not survive that. The destructor then waits for
// the end of the process instead, as later versions do.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// For functions that wait, or that may call other frameworks' callbacks.
inline constexpr nb::call_guard<WithoutGil> no_gil;

// Runs Python's signal handlers (Ctrl-C) while the caller waits. Python runs them on the main
// thread only. Another thread must not take the GIL: the interpreter would end it at shutdown.
void check_signals();

void bind_failures(nb::module_& m);
void bind_requests(nb::module_& m);
void bind_reductions(nb::module_& m);
void bind_group(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_flight(nb::module_& m);
void bind_devices(nb::module_& m);
}  // namespace sdp
