// What torch asks of every device: its current stream, events, and allocators.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "memory.h"
#include "runtime.h"
#include "torch_device.h"

namespace simdev {
namespace {

struct Event {
  std::mutex mutex;
  MarkPtr mark;  // of the last record
  int device = 0;
  bool timed = false;

  MarkPtr last() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

int index_of(c10::Device device) {
  int index = device.has_index() ? device.index() : current_device();
  TORCH_CHECK(index < kDevices, "simdev: there is no device ", index);
  return index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return to_torch(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_torch(Runtime::get().find(index_of(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return to_torch(Runtime::get().create(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_torch(Runtime::get().create(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Stream* ours = from_torch(stream);
    return to_torch(Runtime::get().find(ours->device, exchange_stream(ours->device, ours->id)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return from_torch(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream* ours = from_torch(stream);
    Runtime::get().check(ours->device);
    return Runtime::get().is_idle(ours);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Runtime::get().synchronize(from_torch(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Runtime::get().synchronize_device(device);
  }
  // Overrides where torch is 2.12 or later.
  bool isStreamCapturing(const c10::Stream& stream) const { return from_torch(stream)->capturing; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event;
    auto* ours = static_cast<Event*>(*event);
    Stream* on = from_torch(stream);
    Runtime::get().check(on->device);
    std::lock_guard<std::mutex> lock(ours->mutex);
    ours->mark = Runtime::get().mark(on);
    ours->device = on->device;
    ours->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    MarkPtr mark = static_cast<Event*>(event)->last();
    if (mark != nullptr) Runtime::get().wait_mark(from_torch(stream), mark);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    auto* ours = static_cast<Event*>(event);
    Runtime::get().check(ours->device);
    return Runtime::get().is_done(ours->last());
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto* ours = static_cast<Event*>(event);
    Runtime::get().host_wait(ours->last(), ours->device);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "simdev: both events must be recorded");
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from->timed && to->timed, "simdev: both events need enable_timing=True");
    MarkPtr begin = from->last(), end = to->last();
    TORCH_CHECK(Runtime::get().is_done(begin) && Runtime::get().is_done(end),
                "simdev: both events must have completed");
    return (end->time_s - begin->time_s) * 1e3;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() == &free_block && data.get_context() != nullptr) {
      record_stream(data.get_context(), from_torch(stream));
    }
  }
};

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device();
    if (nbytes == 0) return {nullptr, nullptr, &free_block_of_data, device_at(device)};
    Block* block = nullptr;
    void* data = simdev::allocate(current_stream(device), nbytes, &block);
    return {data, block, &free_block, device_at(device)};
  }
  static void free_block_of_data(void*) {}
  // In stream order, as torch clones storages behind kernels' backs.
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    void *target = alias_of(to), *source = alias_of(from);
    Runtime::get().enqueue(current_stream(device_of(to)), Kind::kWork, "copies",
                           [=] { std::memcpy(target, source, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { simdev::empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto total = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[total].current = static_cast<int64_t>(allocated_bytes(device));
    stats.allocated_bytes[total].peak = static_cast<int64_t>(peak_bytes(device));
    stats.reserved_bytes[total].current = static_cast<int64_t>(reserved_bytes(device));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = pinned_allocate(nbytes);
    return {data, data, &pinned_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    pinned_record(pointer, from_torch(stream));
    return true;
  }
  void empty_cache() override { pinned_empty_cache(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator g_device_allocator;
PinnedAllocator g_pinned_allocator;
c10::impl::DeviceGuardImplRegistrar g_guard(kType, new Guard);
c10::AllocatorRegisterer<kType> g_allocator(&g_device_allocator);
at::HostAllocatorRegistry<kType> g_host_allocator(&g_pinned_allocator);

}  // namespace

c10::Allocator* device_allocator() {
  return &g_device_allocator;
}
c10::Allocator* pinned_allocator() {
  return &g_pinned_allocator;
}

c10::Stream to_torch(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream->device), stream->id);
}

Stream* from_torch(const c10::Stream& stream) {
  return Runtime::get().find(stream.device_index(), stream.id());
}

}  // namespace simdev
