// Registered host memory, pinned memory, and flags in it that streams wait for and write.
#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <shared_mutex>
#include <stdexcept>
#include <vector>

#include "memory.h"

namespace simdev {
namespace {

struct Range {
  size_t nbytes;
  uint64_t id;
  bool of_torch;  // from pinned_allocate
};

struct Pinned {
  size_t nbytes;
  std::vector<Stream*> used_on;
  std::vector<MarkPtr> pending;
};

constexpr size_t kNoLimit = SIZE_MAX;
constexpr size_t kPage = 4096;

struct Host {
  // Streams hold it shared while they read or write host memory, so that unregistering waits.
  std::shared_mutex mutex;
  std::map<uintptr_t, Range> ranges;
  std::map<uintptr_t, Pinned> pinned;  // in use, pending or cached
  std::multimap<size_t, uintptr_t> cached;
  std::list<uintptr_t> freed;  // streams may still use them
  uint64_t next_id = 1;
  size_t limit = kNoLimit;
};
Host* g_host = new Host;  // leaked, as tensors in pinned memory may outlive static objects

bool is_mapped(uintptr_t pointer, size_t nbytes) {
  uintptr_t first = pointer / kPage * kPage;
  uintptr_t end = (pointer + nbytes + kPage - 1) / kPage * kPage;
  return msync(reinterpret_cast<void*>(first), end - first, MS_ASYNC) == 0;
}

int add_range(uintptr_t pointer, size_t nbytes, bool of_torch) {
  if (pointer == 0 || nbytes == 0 || !is_mapped(pointer, nbytes)) return kInvalidValue;
  size_t total = nbytes;
  for (auto& [start, range] : g_host->ranges) {
    if (start < pointer + nbytes && pointer < start + range.nbytes) return kAlreadyRegistered;
    total += range.nbytes;
  }
  if (total > g_host->limit) return kOutOfMemory;
  g_host->ranges[pointer] = {nbytes, g_host->next_id++, of_torch};
  return kOk;
}

uint64_t find_range(uintptr_t pointer, size_t nbytes) {
  auto after = g_host->ranges.upper_bound(pointer);
  if (after == g_host->ranges.begin()) return 0;
  auto& [start, range] = *std::prev(after);
  return pointer + nbytes <= start + range.nbytes ? range.id : 0;
}

void collect_pinned() {
  for (auto it = g_host->freed.begin(); it != g_host->freed.end();) {
    Pinned& pinned = g_host->pinned.at(*it);
    if (std::all_of(pinned.pending.begin(), pinned.pending.end(),
                    [](const MarkPtr& each) { return Runtime::get().is_done(each); })) {
      pinned.pending.clear();
      g_host->cached.emplace(pinned.nbytes, *it);
      it = g_host->freed.erase(it);
    } else {
      ++it;
    }
  }
}

void drop_cached() {
  for (auto& [nbytes, pointer] : g_host->cached) {
    g_host->ranges.erase(pointer);
    g_host->pinned.erase(pointer);
    munmap(reinterpret_cast<void*>(pointer), nbytes);
  }
  g_host->cached.clear();
}

Stream* flag_stream(uint64_t handle, uintptr_t address, uint64_t* id, int* code) {
  Stream* stream = Runtime::get().from_handle(handle);
  *id = registration_of(reinterpret_cast<void*>(address), 4);
  *code = stream == nullptr                       ? kInvalidHandle
          : *id == 0 || address % 4 != 0          ? kInvalidValue
          : Runtime::get().failed(stream->device) ? kFailed
                                                  : kOk;
  return stream;
}

}  // namespace

int host_register(uintptr_t pointer, size_t nbytes) {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  return add_range(pointer, nbytes, false);
}

int host_unregister(uintptr_t pointer) {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  auto found = g_host->ranges.find(pointer);
  if (found == g_host->ranges.end() || found->second.of_torch) return kNotRegistered;
  g_host->ranges.erase(found);
  return kOk;
}

std::map<uintptr_t, size_t> host_registered() {
  std::shared_lock<std::shared_mutex> lock(g_host->mutex);
  std::map<uintptr_t, size_t> found;
  for (auto& [start, range] : g_host->ranges) {
    if (!range.of_torch) found[start] = range.nbytes;
  }
  return found;
}

void set_pin_limit(size_t nbytes) {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  g_host->limit = nbytes;
}

void host_reset() {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  g_host->limit = kNoLimit;
  for (auto it = g_host->ranges.begin(); it != g_host->ranges.end();) {
    it = it->second.of_torch ? std::next(it) : g_host->ranges.erase(it);
  }
}

void forget_host() {
  g_host = new Host;
}

uint64_t registration_of(const void* pointer, size_t nbytes) {
  std::shared_lock<std::shared_mutex> lock(g_host->mutex);
  return find_range(reinterpret_cast<uintptr_t>(pointer), nbytes);
}

void access_host(const void* pointer, size_t nbytes, uint64_t registration,
                 const std::function<void()>& access) {
  std::shared_lock<std::shared_mutex> lock(g_host->mutex);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  if (find_range(at, nbytes) != registration || !is_mapped(at, nbytes)) {
    throw std::runtime_error("simdev: access to unregistered host memory");
  }
  access();
}

void* pinned_allocate(size_t nbytes) {
  if (nbytes == 0) return nullptr;
  size_t rounded = (nbytes + kPage - 1) / kPage * kPage;
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  collect_pinned();
  auto cached = g_host->cached.lower_bound(rounded);
  if (cached != g_host->cached.end() && cached->first <= 2 * rounded) {
    auto pointer = cached->second;
    g_host->cached.erase(cached);
    return reinterpret_cast<void*>(pointer);
  }
  void* made = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) throw std::runtime_error("simdev: no memory to pin");
  auto pointer = reinterpret_cast<uintptr_t>(made);
  int code = add_range(pointer, rounded, true);
  if (code == kOutOfMemory) {
    drop_cached();
    code = add_range(pointer, rounded, true);
  }
  if (code != kOk) {
    munmap(made, rounded);
    throw std::runtime_error("simdev: out of memory to pin, code " + std::to_string(code));
  }
  g_host->pinned[pointer] = {rounded, {}, {}};
  return made;
}

void pinned_free(void* pointer) noexcept {
  if (pointer == nullptr) return;
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  auto found = g_host->pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == g_host->pinned.end()) return;
  Pinned& pinned = found->second;
  for (Stream* stream : pinned.used_on) pinned.pending.push_back(Runtime::get().mark(stream));
  pinned.used_on.clear();
  g_host->freed.push_back(found->first);
}

void pinned_record(const void* pointer, Stream* stream) {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto after = g_host->pinned.upper_bound(at);
  if (after == g_host->pinned.begin()) return;
  auto& [start, pinned] = *std::prev(after);
  if (at >= start + pinned.nbytes) return;  // registered by the user, who keeps it alive
  auto& used = pinned.used_on;
  if (std::find(used.begin(), used.end(), stream) == used.end()) used.push_back(stream);
}

void pinned_empty_cache() {
  std::unique_lock<std::shared_mutex> lock(g_host->mutex);
  collect_pinned();
  drop_cached();
}

int stream_wait_value32(uint64_t handle, uintptr_t address, uint32_t value) {
  uint64_t id;
  int code;
  Stream* stream = flag_stream(handle, address, &id, &code);
  if (code != kOk) return code;
  Runtime& runtime = Runtime::get();
  runtime.enqueue(stream, Kind::kWork, "waits for a flag", [&runtime, address, value, id] {
    auto* flag = reinterpret_cast<uint32_t*>(address);
    for (int tries = 0; !runtime.draining(); ++tries) {
      uint32_t seen = 0;
      access_host(flag, 4, id, [&] { seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE); });
      if (static_cast<int32_t>(seen - value) >= 0) return;
      if (tries > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return kOk;
}

int stream_write_value32(uint64_t handle, uintptr_t address, uint32_t value) {
  uint64_t id;
  int code;
  Stream* stream = flag_stream(handle, address, &id, &code);
  if (code != kOk) return code;
  Runtime::get().enqueue(stream, Kind::kWork, "writes a flag", [address, value, id] {
    auto* flag = reinterpret_cast<uint32_t*>(address);
    access_host(flag, 4, id, [&] { __atomic_store_n(flag, value, __ATOMIC_RELEASE); });
  });
  return kOk;
}

}  // namespace simdev
