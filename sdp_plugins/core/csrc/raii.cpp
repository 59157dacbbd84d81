#include "raii.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace sdp {
namespace {
Hint limit_of(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
      return Hint::open_files;
    case EFBIG:
      return Hint::file_size;
    case ENOMEM:
    case ENOSPC:
      return Hint::mapping_limits;
    default:
      return Hint::none;
  }
}
}  // namespace

Failure shared_memory_failure(const std::string& what) {
  const int error = errno;
  return {FailureKind::shared_memory, what + ": " + std::strerror(error), {}, limit_of(error)};
}

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}
FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(int fd, std::size_t nbytes, std::size_t offset, bool populate) {
  map(fd, nbytes, offset, MAP_SHARED | (populate ? MAP_POPULATE : 0));
}

Mapping Mapping::copy_on_write(int fd, std::size_t nbytes) {
  Mapping mapping;
  mapping.map(fd, nbytes, 0, MAP_PRIVATE | MAP_NORESERVE);
  return mapping;
}

void Mapping::map(int fd, std::size_t nbytes, std::size_t offset, int flags) {
  // Access to a page past the end of the file raises SIGBUS: check the file, do not trust the peer.
  struct stat info{};
  const std::size_t held = fstat(fd, &info) == 0 ? static_cast<std::size_t>(info.st_size) : 0;
  if (offset > held || nbytes > held - offset) {
    throw Failure(FailureKind::shared_memory, "a shared memory file holds " + std::to_string(held) +
                                                  " bytes, but " + std::to_string(nbytes) +
                                                  " at offset " + std::to_string(offset) +
                                                  " were announced");
  }
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    throw shared_memory_failure("cannot map " + std::to_string(nbytes) + " bytes of shared memory");
  }
  data_ = static_cast<std::byte*>(data);
  nbytes_ = nbytes;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, nbytes_);
}
}  // namespace sdp
