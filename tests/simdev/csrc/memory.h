// Device memory behind a caching allocator, and registered host memory. Without torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "runtime.h"

namespace simdev {

struct Block;

// Memory of `stream`'s device. `*block` owns it until `free_block`.
void* allocate(Stream* stream, size_t nbytes, Block** block);
void free_block(void* block) noexcept;
void record_stream(void* block, Stream* stream);
size_t allocated_bytes(int device);
size_t reserved_bytes(int device);
size_t peak_bytes(int device);
void reset_peak(int device);
void empty_cache();
void set_poison_late(bool late);  // when memory is handed out again, not when it is freed
void forget_memory();             // in a forked child

// Where kernels reach what the host sees at `pointer`. Throws if it is not device memory.
void* alias_of(const void* pointer);
int device_of(const void* pointer);  // -1: not device memory

// Error codes are CUDA's.
enum Code {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidHandle = 400,
  kFailed = 700,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
};

int host_register(uintptr_t pointer, size_t nbytes);
int host_unregister(uintptr_t pointer);
std::map<uintptr_t, size_t> host_registered();
void set_pin_limit(size_t nbytes);
void host_reset();  // forgets what users registered, and the limit

void forget_host();  // in a forked child

// The registration that holds all of the range; 0 if none does.
uint64_t registration_of(const void* pointer, size_t nbytes);

// Runs `access` while the range stays registered as `registration`; else throws.
void access_host(const void* pointer, size_t nbytes, uint64_t registration,
                 const std::function<void()>& access);

// Pinned memory of torch's: registered, cached, reused once the streams that used it are past.
void* pinned_allocate(size_t nbytes);
void pinned_free(void* pointer) noexcept;
void pinned_record(const void* pointer, Stream* stream);
void pinned_empty_cache();

// Enqueues a copy between a kernel's address and host memory; 0: this is not registered.
void copy_over_link(Stream* stream, void* at_device, void* at_host, size_t nbytes,
                    uint64_t registration, Direction direction);

int stream_wait_value32(uint64_t handle, uintptr_t address, uint32_t value);
int stream_write_value32(uint64_t handle, uintptr_t address, uint32_t value);

}  // namespace simdev
