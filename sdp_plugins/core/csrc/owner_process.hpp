// The process that has made an object: a forked child has a copy, which it must not use.
#pragma once

#include <cstdint>

namespace sdp {

// Forks between the process that has loaded this library and this one. Unlike getpid, no system
// call.
std::uint32_t forks();

class OwnerProcess {
 public:
  bool is_this() const { return forks() == forks_; }

 private:
  const std::uint32_t forks_ = forks();
};
}  // namespace sdp
