// Copies between a device such as a GPU and staging memory, with the flags that order them and the
// operations of `device_flags.hpp`. This library links with no device's driver: its functions come
// by address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device_flags.hpp"

namespace sdp {

// What a driver has, with the arguments that CUDA's functions take. Each enqueues something on a
// stream, and returns 0 or an error code.
struct DeviceFunctions {
  using Address = unsigned long long;
  using CopyDown = int (*)(void* host, Address device, std::size_t nbytes, void* stream);
  using CopyUp = int (*)(Address device, const void* host, std::size_t nbytes, void* stream);
  using Flag = int (*)(void* stream, Address flag, std::uint32_t value, unsigned options);

  CopyDown copy_down;
  CopyUp copy_up;
  Flag write;  // with options 0: after all that is enqueued before
  Flag wait;   // with options 0: until int32(flag - value) >= 0
};

struct StagedPiece {
  DeviceFunctions::Address device;
  void* staging;
  std::size_t nbytes;
  DeviceFlags flags;
};

// Two streams of one device. Their functions return the first error code, after which nothing more
// is enqueued; 0 if there is none.
class DeviceStreams {
 public:
  DeviceStreams(const DeviceFunctions& functions, void* down, void* up)
      : functions_(functions), down_(down), up_(up) {}

  // Enqueues, for each piece: its copy to staging memory, then the flag that this is there.
  int copy_down(std::span<const StagedPiece> pieces) const;
  // Enqueues, for each piece: to wait for the flag that its result is there, then its copy back.
  int copy_up(std::span<const StagedPiece> pieces) const;

 private:
  DeviceFunctions functions_;
  void* down_;
  void* up_;
};
}  // namespace sdp
