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
  // One that shows what is written into the file, but keeps writes to itself (copy on write).
  static Mapping copy_on_write(int fd, std::size_t nbytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  void map(int fd, std::size_t nbytes, std::size_t offset, int flags);

  std::byte* data_ = nullptr;
  std::size_t nbytes_ = 0;
};

// A memory file as peers use it, and this process' own view of it, where there is one.
struct MappedFile {
  Mapping shared;
  Mapping view;  // copy on write
};
}  // namespace sdp
