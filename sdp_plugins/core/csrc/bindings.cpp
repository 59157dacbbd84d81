// The Python module `sdp_plugins.core._native`.
#include "bindings.hpp"

#include <nanobind/ndarray.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <tuple>

#include "path_choice.hpp"

namespace sdp {
namespace {
template <class Enum>
void bind_enum(nb::module_& m, const char* type, int values) {
  nb::enum_<Enum> bound(m, type, nb::is_arithmetic());
  for (int i = 0; i < values; ++i) {
    const auto value = static_cast<Enum>(i);
    bound.value(name(value).data(), value);
  }
}
}  // namespace

nb::bytes as_bytes(const std::vector<std::byte>& data) {
  return nb::bytes(data.data(), data.size());
}

WithoutGil::~WithoutGil() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // pthread_exit unwinds the stack
    for (;;) pause();
  }
}

void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw Interrupted{std::make_exception_ptr(nb::python_error())};
}
}  // namespace sdp

NB_MODULE(_native, m) {
  using namespace sdp;
  m.doc() = "The native core: shared-memory collectives and balanced fusion buffers.";
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // frameworks keep groups in globals until the interpreter ends

  bind_enum<DType>(m, "DType", kDTypes);
  bind_enum<ReduceOp>(m, "ReduceOp", kReduceOps);
  bind_enum<Op>(m, "Op", kOps);
  bind_failures(m);
  bind_requests(m);
  bind_reductions(m);
  bind_blocks(m);
  bind_flight(m);
  bind_group(m);
  bind_devices(m);
  m.def(
      "path_name", [](int path) { return name(static_cast<Path>(path)); }, "path"_a,
      "What `last_path` calls the path of a traced event.");
  m.def("explain", &explain, "op"_a, "nbytes"_a, "registered"_a,
        "The path for an operation in which each rank shows `nbytes`, and why.");

  m.def(
      "address",
      [](nb::handle exporter, bool writable) {
        Py_buffer view;
        const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(exporter.ptr(), &view, flags) != 0) throw nb::python_error();
        const auto at = reinterpret_cast<std::uintptr_t>(view.buf);
        PyBuffer_Release(&view);
        return at;
      },
      "exporter"_a, "writable"_a = false,
      "Where a contiguous object's memory lies, by the buffer protocol, which refuses others.");
  m.def(
      "inspect",
      [](const nb::object& owner) {
        nb::ndarray<> writable;
        nb::ndarray<nb::ro> array;  // neither cast copies
        const bool may_write = nb::try_cast(owner, writable, false);
        if (!nb::try_cast(owner, array, false)) throw nb::type_error("not an array");
        std::vector<std::size_t> shape;
        std::vector<std::int64_t> strides;
        for (std::size_t i = 0; i < array.ndim(); ++i) {
          shape.push_back(array.shape(i));
          strides.push_back(array.stride(i));
        }
        return std::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape, strides,
                               int{array.dtype().code}, int{array.dtype().bits}, may_write);
      },
      "array"_a,
      "(address, shape, strides in elements, DLPack type code, bits, writable) of an array.");
}
