// What each thread of the host has as its current device and streams.
#include "runtime.h"

namespace simdev {
namespace {
thread_local int t_device = 0;
thread_local std::array<int64_t, kDevices> t_streams{};
}  // namespace

int current_device() {
  return t_device;
}

void set_current_device(int device) {
  t_device = device;
}

Stream* current_stream(int device) {
  return Runtime::get().find(device, t_streams[device]);
}

int64_t exchange_stream(int device, int64_t id) {
  int64_t before = t_streams[device];
  t_streams[device] = id;
  return before;
}

void forget_thread_state() {
  t_streams = {};
}

}  // namespace simdev
