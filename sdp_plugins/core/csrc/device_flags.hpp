// Two 32-bit words in memory that the host and a device such as a GPU share, by which an operation
// starts and ends without the program's help. The device's stream writes `ready` when the operation
// may use its memory, and then waits for `done`, which is set however the operation ends: after a
// failure when the device has arrived, with outputs that are 0xFF throughout. Only a group that is
// closed does not wait for long.
#pragma once

#include <atomic>
#include <cstdint>

namespace sdp {

// Borrowed: both words are valid until the operation's Work is done.
struct DeviceFlags {
  std::uint32_t* ready = nullptr;
  std::uint32_t* done = nullptr;
  std::uint32_t value = 0;  // of both words. May wrap around: compared as the device compares

  bool is_ready() const {
    const std::uint32_t seen = std::atomic_ref(*ready).load(std::memory_order_acquire);
    return static_cast<std::int32_t>(seen - value) >= 0;
  }
  void set_done() const { std::atomic_ref(*done).store(value, std::memory_order_release); }
};
}  // namespace sdp
