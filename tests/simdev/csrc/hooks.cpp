// What torch asks of an accelerator: whether it is there, its pinned memory, its generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"
#include "ops.h"
#include "torch_device.h"

namespace simdev {
namespace {

// Draws the CPU's numbers: what a seed gives is the same on both.
struct GeneratorImpl final : c10::GeneratorImpl {
  GeneratorImpl(int index, at::Generator cpu)
      : c10::GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new GeneratorImpl(device_.index(), cpu.clone());
  }

  at::Generator cpu;
};

at::Generator make_generator(int index) {
  return at::make_generator<GeneratorImpl>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int index) {
  static std::array<at::Generator, kDevices> made = [] {
    std::array<at::Generator, kDevices> all;
    for (int each = 0; each < kDevices; ++each) all[each] = make_generator(each);
    return all;
  }();
  return made.at(index < 0 ? current_device() : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return Runtime::get().is_used(index);
  }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index < kDevices, "simdev: there is no device ", int(index));
    if (index >= 0) set_current_device(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return registration_of(data, 1) != 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    int index = device_of(data);
    TORCH_CHECK(index >= 0, "simdev: not device memory");
    return device_at(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index < 0 ? current_device() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

TORCH_LIBRARY_FRAGMENT(simdev, m) {
  m.def("default_generator(int index) -> Generator?",
        [](int64_t index) { return default_generator(static_cast<int>(index)); });
}

struct Registrar {
  Registrar() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} g_registrar;

}  // namespace

at::Generator cpu_generator(const std::optional<at::Generator>& generator, int device) {
  const at::Generator& ours =
      generator.has_value() && generator->defined() ? *generator : default_generator(device);
  if (ours.device().type() != kType) return ours;
  return static_cast<GeneratorImpl*>(ours.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace simdev
