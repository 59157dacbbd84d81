// Owners (RAII) of file descriptors and of mapped files.
#pragma once

#include <cstddef>
#include <string>

#include "error.hpp"

namespace sdp {
// What has just failed for want of shared memory, the reason by `errno`, and the limit to raise.
Failure shared_memory_failure(const std::string& what);

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// A mapped memory file. Owns the mapping, not the file descriptor.
class Mapping {
 public:
  Mapping() = default;
  // Throws Failure(shared_memory). `populate` fills the page tables at once.
  Mapping(int fd, std::size_t nbytes, std::size_t offset, bool populate);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};
}  // namespace sdp
