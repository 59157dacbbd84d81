// Between torch's types and the runtime's.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace simdev {

constexpr auto kType = c10::DeviceType::PrivateUse1;

inline c10::Device device_at(int index) {
  return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

c10::Stream to_torch(const Stream* stream);
Stream* from_torch(const c10::Stream& stream);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

}  // namespace simdev
