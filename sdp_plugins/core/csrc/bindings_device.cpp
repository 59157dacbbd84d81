// Bindings of DeviceStreams.
#include "bindings.hpp"
#include "device_streams.hpp"

namespace sdp {
namespace {
// (device address, staging address, bytes, flags)
using Staged = std::tuple<std::uint64_t, std::uintptr_t, std::size_t, FlagAddresses>;

template <int (DeviceStreams::*kCopy)(std::span<const StagedPiece>) const>
int copy(const DeviceStreams& streams, const std::vector<Staged>& staged) {
  std::vector<StagedPiece> pieces;
  pieces.reserve(staged.size());
  for (const auto& [device, staging, nbytes, flags] : staged) {
    pieces.push_back({device, reinterpret_cast<void*>(staging), nbytes, flags_at(flags)});
  }
  return (streams.*kCopy)(pieces);
}

template <class Function>
Function function_at(std::uintptr_t address) {
  return reinterpret_cast<Function>(address);
}
}  // namespace

DeviceFlags flags_at(const FlagAddresses& addresses) {
  const auto [ready, done, value] = addresses;
  return {reinterpret_cast<std::uint32_t*>(ready), reinterpret_cast<std::uint32_t*>(done), value};
}

void bind_devices(nb::module_& m) {
  nb::class_<DeviceStreams>(m, "DeviceStreams", "A device's streams for copies down and up.")
      .def(
          "__init__",
          [](DeviceStreams* made, std::uintptr_t copy_down, std::uintptr_t copy_up,
             std::uintptr_t write, std::uintptr_t wait, std::uintptr_t down, std::uintptr_t up) {
            const DeviceFunctions functions{function_at<DeviceFunctions::CopyDown>(copy_down),
                                            function_at<DeviceFunctions::CopyUp>(copy_up),
                                            function_at<DeviceFunctions::Flag>(write),
                                            function_at<DeviceFunctions::Flag>(wait)};
            new (made) DeviceStreams(functions, reinterpret_cast<void*>(down),
                                     reinterpret_cast<void*>(up));
          },
          "copy_down"_a, "copy_up"_a, "write"_a, "wait"_a, "down"_a, "up"_a,
          "The driver's functions, by address, and its handles of the two streams.")
      .def("copy_down", &copy<&DeviceStreams::copy_down>, no_gil, "pieces"_a,
           "Enqueues the copy of each (device, staging, nbytes, (ready, done, value)) to staging "
           "memory, and `ready`; returns the driver's error code.")
      .def("copy_up", &copy<&DeviceStreams::copy_up>, no_gil, "pieces"_a,
           "Enqueues, for each piece, to wait for `done`, and the copy back; likewise.");
}
}  // namespace sdp
