#include "memory_regions.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>

namespace sdp {
namespace {
// Page tables of larger regions fill at the first accesses: nothing could interrupt their filling.
constexpr std::uint64_t kMostPopulated = 256 << 20;

// Space for one file descriptor beside a message.
union Control {
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr align;
};

FileDescriptor duplicate(int fd) {
  FileDescriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) {
    throw shared_memory_failure("cannot share a memory file");
  }
  return copy;
}

Failure malformed(const Peers& peers, int rank, const std::string& what) {
  return peers.blame(FailureKind::mismatch, rank, " sent a " + what + " about registered memory");
}
}  // namespace

Regions::Regions(const Peers& peers)
    : peers_(peers),
      seen_(static_cast<std::size_t>(peers.world_size())),
      mapped_(static_cast<std::size_t>(peers.world_size())) {}

std::uint64_t Regions::add(std::byte* data, std::uint64_t nbytes, int fd, std::uint64_t file_offset,
                           bool with_view) {
  if (nbytes == 0) throw std::invalid_argument("registered memory must not be empty");
  const std::lock_guard lock(mutex_);
  const std::uint64_t region = next_region_++;
  std::vector<RegionUpdate> updates;
  for (int r = 0; r < peers_.world_size(); ++r) {
    if (r == peers_.rank()) continue;
    updates.push_back({r, {region, nbytes, file_offset, with_view}, duplicate(fd)});
  }
  const Mapping probe(fd, nbytes, file_offset, false);  // as the peers will map it: fails here
  std::move(updates.begin(), updates.end(), std::back_inserter(outbox_));
  own_[region] = {data, nbytes, false};
  flush();
  return region;
}

// A peer that was not told of the region need not be told of its end either. The outbox is
// therefore bounded by the number of live regions.
void Regions::remove(std::uint64_t region) {
  const std::lock_guard lock(mutex_);
  if (own_.erase(region) == 0) return;
  for (int r = 0; r < peers_.world_size(); ++r) {
    if (r == peers_.rank()) continue;
    const auto unsent =
        std::find_if(outbox_.begin(), outbox_.end(), [&](const RegionUpdate& update) {
          return update.to == r && update.message.region == region;
        });
    if (unsent != outbox_.end()) {
      outbox_.erase(unsent);
    } else {
      outbox_.push_back({r, {region, 0, 0, 0}, FileDescriptor()});
    }
  }
  flush();
}

std::optional<RegionPlace> Regions::find(const std::byte* data, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  flush();
  for (const auto& [region, own] : own_) {
    if (data >= own.data && data + nbytes <= own.data + own.nbytes) {
      if (!own.announced) return std::nullopt;
      return RegionPlace{region, static_cast<std::uint64_t>(data - own.data)};
    }
  }
  return std::nullopt;
}

std::uint64_t Regions::version() {
  const std::lock_guard lock(mutex_);
  return version_;
}

// Sends in order, up to the first full socket, without waiting: memory is not used in place until
// its region is announced to all peers.
void Regions::flush() {
  while (!outbox_.empty() && send(outbox_.front())) outbox_.pop_front();
  for (auto& [region, own] : own_) {
    const auto of_region = [id = region](const RegionUpdate& update) {
      return update.message.region == id;
    };
    own.announced = own.announced || std::none_of(outbox_.begin(), outbox_.end(), of_region);
  }
}

bool Regions::send(const RegionUpdate& update) {
  iovec part{const_cast<Message*>(&update.message), sizeof update.message};
  Control control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (const int fd = update.file.get(); fd >= 0) {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof control.bytes;
    cmsghdr* attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(attached), &fd, sizeof fd);
  }
  const ssize_t sent = sendmsg(peers_.socket(update.to), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS)) return false;
  ++version_;  // any other error: the peer is gone, as the next operation will detect
  return true;
}

// Maps what is left when all messages are read: the peer may have freed a region meanwhile.
void Regions::sync(int rank, std::uint64_t version) {
  auto& seen = seen_[static_cast<std::size_t>(rank)];
  if (seen == version) return;
  seen = version;
  const std::lock_guard lock(mutex_);
  auto& mapped = mapped_[static_cast<std::size_t>(rank)];
  std::map<std::uint64_t, RegionUpdate> added;
  while (auto update = receive(rank)) {
    const std::uint64_t region = update->message.region;
    if (update->message.nbytes == 0) {
      added.erase(region);
      mapped.erase(region);
    } else {
      added.insert_or_assign(region, std::move(*update));
    }
  }
  for (const auto& [region, update] : added) {
    const auto& [_, nbytes, offset, with_view] = update.message;
    const int fd = update.file.get();
    try {
      Mapping shared(fd, nbytes, offset, nbytes <= kMostPopulated);
      Mapping view = with_view != 0 ? Mapping::copy_on_write(fd, nbytes) : Mapping();
      mapped[region] =
          std::make_shared<const MappedFile>(MappedFile{std::move(shared), std::move(view)});
    } catch (Failure& failure) {
      failure.cause += " (memory of " + peers_.names().list({peers_.id(rank)}) + ")";
      throw;
    }
  }
}

std::optional<Regions::RegionUpdate> Regions::receive(int rank) {
  RegionUpdate update{rank, {}, FileDescriptor()};
  iovec part{&update.message, sizeof update.message};
  Control control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen = sizeof control.bytes;
  const ssize_t got = recvmsg(peers_.socket(rank), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return std::nullopt;
  if (cmsghdr* attached = CMSG_FIRSTHDR(&header);
      attached != nullptr && attached->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(attached), sizeof fd);
    update.file = FileDescriptor(fd);
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    throw Failure(
        FailureKind::shared_memory,
        "no file descriptor is left for memory of " + peers_.names().list({peers_.id(rank)}),
        {peers_.id(peers_.rank())}, Hint::open_files_or_no_register);
  }
  const bool cut = (header.msg_flags & MSG_TRUNC) != 0;
  if (cut || got != static_cast<ssize_t>(sizeof update.message)) {
    throw malformed(peers_, rank, "malformed message");
  }
  if (update.message.nbytes != 0 && update.file.get() < 0) {
    throw malformed(peers_, rank, "message without a file");
  }
  return update;
}

std::byte* Regions::address(int rank, RegionPlace place, std::uint64_t nbytes) const {
  const auto& mapped = mapped_[static_cast<std::size_t>(rank)];
  const auto found = mapped.find(place.region);
  if (found == mapped.end()) return nullptr;
  const Mapping& mapping = found->second->shared;
  if (place.offset > mapping.nbytes() || nbytes > mapping.nbytes() - place.offset) {
    throw malformed(peers_, rank, "range outside its region");
  }
  return mapping.data() + place.offset;
}

void give_back_pages(std::byte* data, std::size_t nbytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (start + page - 1) / page * page;
  const std::uintptr_t last = (start + nbytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_REMOVE);
}

std::shared_ptr<const MappedFile> Regions::mapping(int rank, std::uint64_t region) {
  const std::lock_guard lock(mutex_);
  const auto& mapped = mapped_[static_cast<std::size_t>(rank)];
  const auto found = mapped.find(region);
  return found == mapped.end() ? nullptr : found->second;
}
}  // namespace sdp
