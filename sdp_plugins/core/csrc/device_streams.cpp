#include "device_streams.hpp"

namespace sdp {
namespace {
DeviceFunctions::Address address(const std::uint32_t* word) {
  return reinterpret_cast<std::uintptr_t>(word);
}
}  // namespace

int DeviceStreams::copy_down(std::span<const StagedPiece> pieces) const {
  for (const auto& [device, staging, nbytes, flags] : pieces) {
    int code = nbytes > 0 ? functions_.copy_down(staging, device, nbytes, down_) : 0;
    if (code == 0) code = functions_.write(down_, address(flags.ready), flags.value, 0);
    if (code != 0) return code;
  }
  return 0;
}

int DeviceStreams::copy_up(std::span<const StagedPiece> pieces) const {
  for (const auto& [device, staging, nbytes, flags] : pieces) {
    int code = functions_.wait(up_, address(flags.done), flags.value, 0);
    if (code == 0 && nbytes > 0) code = functions_.copy_up(device, staging, nbytes, up_);
    if (code != 0) return code;
  }
  return 0;
}
}  // namespace sdp
