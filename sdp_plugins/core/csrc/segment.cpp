#include "segment.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace sdp {
namespace {
constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}
constexpr std::size_t kPage = 4096;
constexpr std::size_t kRecordsAt = 1024;
constexpr std::size_t kSplitsAt = kRecordsAt + 2 * kAlign;
}  // namespace

Layout::Layout(int world_size, std::size_t staging_bytes)
    : world_size_(static_cast<std::size_t>(world_size)),
      splits_bytes_(round_up(world_size_ * sizeof(std::uint64_t), kAlign)),
      // Each slot is cut into one piece per rank, each aligned.
      slot_bytes_(
          round_up(std::max<std::size_t>(staging_bytes / kSlots, 1), kAlign * world_size_)) {}

std::size_t Layout::record(int parity) const {
  return kRecordsAt + static_cast<std::size_t>(parity) * kAlign;
}
std::size_t Layout::splits(int parity) const {
  return kSplitsAt + static_cast<std::size_t>(parity) * splits_bytes_;
}
std::size_t Layout::expected(int parity) const {
  return splits(2) + static_cast<std::size_t>(parity) * splits_bytes_;
}
std::size_t Layout::inline_payload(int parity) const {
  return round_up(expected(2), kPage) + static_cast<std::size_t>(parity) * kInlineBytes;
}
std::size_t Layout::slot(int index) const {
  return inline_payload(2) + static_cast<std::size_t>(index) * slot_bytes_;
}
std::size_t Layout::ring_control(int dst) const {
  return round_up(slot(kSlots), kPage) + static_cast<std::size_t>(dst) * sizeof(RingControl);
}
std::size_t Layout::ring_data(int dst) const {
  return round_up(ring_control(static_cast<int>(world_size_)), kPage) +
         static_cast<std::size_t>(dst) * kRingBytes;
}
std::size_t Layout::flight() const {
  return ring_data(static_cast<int>(world_size_));
}
std::size_t Layout::total() const {
  return flight() + sizeof(FlightArea);
}

Mapping::Mapping(int fd, std::size_t nbytes, std::size_t offset, bool populate) : nbytes_(nbytes) {
  // Touching a page past the end of the file is a SIGBUS: believe the file, not the peer.
  struct stat info{};
  const std::size_t held = fstat(fd, &info) == 0 ? static_cast<std::size_t>(info.st_size) : 0;
  if (offset > held || nbytes > held - offset) {
    throw Failure(FailureKind::shared_memory, "a shared memory file holds " + std::to_string(held) +
                                                  " bytes, but " + std::to_string(nbytes) +
                                                  " at offset " + std::to_string(offset) +
                                                  " were announced");
  }
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    throw Failure(
        FailureKind::shared_memory,
        "cannot map " + std::to_string(nbytes) + " bytes of shared memory: " + std::strerror(errno),
        {}, Hint::mapping_limits);
  }
  data_ = static_cast<std::byte*>(data);
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
