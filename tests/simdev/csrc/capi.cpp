// C functions for ctypes. None throws: where one can fail it returns a code, and
// simdev_last_error has the text.
#include <cstring>
#include <exception>

#include "fallback.h"
#include "memory.h"
#include "runtime.h"

using simdev::Runtime;

namespace {

thread_local std::string t_error;

template <class Function>
int guarded(Function function) {
  try {
    function();
    return simdev::kOk;
  } catch (const std::exception& error) {
    t_error = error.what();
    return simdev::kFailed;
  }
}

int copy_out(const std::string& text, char* buffer, int size) {
  if (static_cast<int>(text.size()) < size) std::memcpy(buffer, text.c_str(), text.size() + 1);
  return static_cast<int>(text.size());
}

simdev::Stream* stream_of(uint64_t handle) {
  simdev::Stream* stream = Runtime::get().from_handle(handle);
  if (stream == nullptr) throw std::runtime_error("simdev: no such stream");
  return stream;
}

int copy(void* host, uint64_t device, size_t nbytes, uint64_t stream, simdev::Direction direction) {
  int code = simdev::kInvalidValue;
  int failed = guarded([&] {
    void* at_device = simdev::alias_of(reinterpret_cast<const void*>(device));
    uint64_t registration = simdev::registration_of(host, nbytes);
    if (registration == 0) return;
    simdev::copy_over_link(stream_of(stream), at_device, host, nbytes, registration, direction);
    code = simdev::kOk;
  });
  return failed != 0 ? failed : code;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* simdev_last_error() {
  return t_error.c_str();
}

// The current stream of a device, as an address.
uint64_t simdev_current_stream(int device) {
  return reinterpret_cast<uint64_t>(simdev::current_stream(device));
}

// A stream by its device and stream_id; 0 if there is none.
uint64_t simdev_stream(int device, int64_t id) {
  uint64_t found = 0;
  guarded([&] { found = reinterpret_cast<uint64_t>(Runtime::get().find(device, id)); });
  return found;
}

int64_t simdev_gate_create() {
  return Runtime::get().gate_create();
}
void simdev_gate_open(int64_t gate) {
  Runtime::get().gate_open(gate);
}
int simdev_gate_block(int64_t gate, uint64_t stream) {
  return guarded([=] { Runtime::get().gate_block(gate, stream_of(stream)); });
}

int simdev_spin(uint64_t stream, double seconds) {
  return guarded([=] {
    Runtime::get().enqueue(stream_of(stream), simdev::Kind::kWork, "spins",
                           [seconds] { Runtime::get().sleep_until(simdev::now_s() + seconds); });
  });
}

int simdev_fail_next(uint64_t stream, const char* text) {
  return guarded([=] {
    simdev::Stream* found = stream_of(stream);
    std::lock_guard<std::mutex> lock(Runtime::get().mutex);
    found->failing = true;
    found->fail_text = text;
  });
}

int simdev_set_capturing(uint64_t stream, int capturing) {
  return guarded([=] { stream_of(stream)->capturing = capturing != 0; });
}

int simdev_is_capturing(uint64_t stream) {
  return stream_of(stream)->capturing ? 1 : 0;
}

void simdev_set_link(double bytes_per_s) {
  Runtime::get().set_link(bytes_per_s);
}
void simdev_set_deadline(double seconds) {
  Runtime::get().set_deadline(seconds);
}
void simdev_set_poison_late(int late) {
  simdev::set_poison_late(late != 0);
}

int simdev_host_register(uint64_t pointer, uint64_t nbytes) {
  return simdev::host_register(pointer, nbytes);
}
int simdev_host_unregister(uint64_t pointer) {
  return simdev::host_unregister(pointer);
}
void simdev_set_pin_limit(uint64_t nbytes) {
  simdev::set_pin_limit(nbytes);
}

// "address nbytes" in lines; returns the length, which may be above `size`.
int simdev_registered(char* buffer, int size) {
  std::string text;
  for (auto& [pointer, nbytes] : simdev::host_registered()) {
    text += std::to_string(pointer) + " " + std::to_string(nbytes) + "\n";
  }
  return copy_out(text, buffer, size);
}

int simdev_synchronous_ops(char* buffer, int size) {
  return copy_out(simdev::synchronous_ops(), buffer, size);
}

// As cuMemcpyDtoHAsync and cuMemcpyHtoDAsync with registered memory; others are refused.
int simdev_copy_down(void* host, uint64_t device, uint64_t nbytes, uint64_t stream) {
  return copy(host, device, nbytes, stream, simdev::kDown);
}
int simdev_copy_up(uint64_t device, const void* host, uint64_t nbytes, uint64_t stream) {
  return copy(const_cast<void*>(host), device, nbytes, stream, simdev::kUp);
}

// As cuStreamWaitValue32 with CU_STREAM_WAIT_VALUE_GEQ, and cuStreamWriteValue32. A stream is its
// stream_id (0: the current device's default stream) or its native_handle.
int simdev_stream_wait_value32(uint64_t stream, uint64_t address, uint32_t value, unsigned) {
  int code = simdev::kFailed;
  int failed = guarded([&] { code = simdev::stream_wait_value32(stream, address, value); });
  return failed != 0 ? failed : code;
}
int simdev_stream_write_value32(uint64_t stream, uint64_t address, uint32_t value, unsigned) {
  int code = simdev::kFailed;
  int failed = guarded([&] { code = simdev::stream_write_value32(stream, address, value); });
  return failed != 0 ? failed : code;
}

uint64_t simdev_memory_allocated(int device) {
  return simdev::allocated_bytes(device);
}
uint64_t simdev_memory_reserved(int device) {
  return simdev::reserved_bytes(device);
}
uint64_t simdev_max_memory_allocated(int device) {
  return simdev::peak_bytes(device);
}
void simdev_reset_peak(int device) {
  simdev::reset_peak(device);
}
int simdev_empty_cache() {
  return guarded([] { simdev::empty_cache(); });
}

void simdev_reset() {
  Runtime::get().reset();
  simdev::host_reset();
  simdev::set_poison_late(false);
}
void simdev_shut_down() {
  Runtime::get().shut_down();
}

}  // extern "C"
#pragma GCC visibility pop
