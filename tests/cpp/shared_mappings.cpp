// Stands in for mmap and munmap in the tests (linked with --wrap), for files that are mapped
// shared.
//
// The ranks of a test are threads of one process. Mapped as in real life, every rank would see the
// segments at other addresses, and ThreadSanitizer, which knows addresses only, would find no race
// between ranks. Here the same part of a file has one address for all of them: every access of one
// rank to what another one writes (records, splits, payloads, slots, rings, registered memory, the
// cause of a failure) is checked against the release/acquire pairs of FutexCounter, RingControl and
// Header::state. What it still cannot see: fences (they order only who is woken), the kernel's side
// of a futex, and reorderings that another processor might do.
//
// Around every mapping lies memory that nobody may touch, so that an access outside of it ends the
// program; AddressSanitizer knows nothing of mappings.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <tuple>

extern "C" {
void* __real_mmap(void* hint, std::size_t nbytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* data, std::size_t nbytes);
}

namespace {
constexpr std::size_t kPage = 4096;
constexpr std::size_t kGuard = 16 << 20;

struct Shared {
  std::byte* data;
  int users;
};
using Key = std::tuple<dev_t, ino_t, off_t, std::size_t>;

struct Registry {
  std::mutex mutex;
  std::map<Key, Shared> shared;
};
Registry& registry() {
  static Registry all;
  return all;
}

std::size_t reserved(std::size_t nbytes) {
  return (nbytes + kPage - 1) / kPage * kPage + 2 * kGuard;
}

void* map_guarded(std::size_t nbytes, int protection, int flags, int fd, off_t offset) {
  void* space = __real_mmap(nullptr, reserved(nbytes), PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return space;
  void* data = __real_mmap(static_cast<std::byte*>(space) + kGuard, nbytes, protection,
                           flags | MAP_FIXED, fd, offset);
  if (data == MAP_FAILED) __real_munmap(space, reserved(nbytes));
  return data;
}
}  // namespace

extern "C" void* __wrap_mmap(void* hint, std::size_t nbytes, int protection, int flags, int fd,
                             off_t offset) {
  struct stat info{};
  const bool plain = (flags & MAP_SHARED) == 0 || nbytes > (std::size_t{1} << 40);
  if (plain || fd < 0 || fstat(fd, &info) != 0) {
    return __real_mmap(hint, nbytes, protection, flags, fd, offset);
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const Key key{info.st_dev, info.st_ino, offset, nbytes};
  if (const auto known = all.shared.find(key); known != all.shared.end()) {
    ++known->second.users;
    return known->second.data;
  }
  void* data = map_guarded(nbytes, protection, flags, fd, offset);
  if (data != MAP_FAILED) all.shared[key] = {static_cast<std::byte*>(data), 1};
  return data;
}

extern "C" int __wrap_munmap(void* data, std::size_t nbytes) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (auto entry = all.shared.begin(); entry != all.shared.end(); ++entry) {
    if (entry->second.data != data) continue;
    if (--entry->second.users > 0) return 0;
    all.shared.erase(entry);
    return __real_munmap(static_cast<std::byte*>(data) - kGuard, reserved(nbytes));
  }
  return __real_munmap(data, nbytes);
}
