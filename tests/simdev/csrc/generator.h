// Random numbers of the device are drawn on the host, when an operator is called.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace simdev {

// What draws for `generator`, or for the device's default one.
at::Generator cpu_generator(const std::optional<at::Generator>& generator, int device);

}  // namespace simdev
