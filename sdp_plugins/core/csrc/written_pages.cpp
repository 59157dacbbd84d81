#include "written_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "raii.hpp"

namespace sdp {
namespace {
// Of an entry of /proc/self/pagemap, see Documentation/admin-guide/mm/pagemap.rst in Linux.
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;

bool is_written(std::uint64_t entry) {
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0;
}
}  // namespace

std::vector<std::pair<std::size_t, std::size_t>> written_pages(const std::byte* view,
                                                               std::size_t nbytes) {
  const FileDescriptor pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (pagemap.get() < 0) throw shared_memory_failure("cannot open /proc/self/pagemap");
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t pages = (nbytes + page - 1) / page;
  const std::size_t first = reinterpret_cast<std::uintptr_t>(view) / page;
  std::vector<std::pair<std::size_t, std::size_t>> written;
  std::array<std::uint64_t, 4096> entries;
  for (std::size_t done = 0; done < pages;) {
    const std::size_t count = std::min(pages - done, entries.size());
    const auto want = static_cast<ssize_t>(count * sizeof entries[0]);
    const auto offset = static_cast<off_t>((first + done) * sizeof entries[0]);
    if (pread(pagemap.get(), entries.data(), count * sizeof entries[0], offset) != want) {
      throw shared_memory_failure("/proc/self/pagemap does not tell which pages were written");
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (!is_written(entries[i])) continue;
      const std::size_t start = (done + i) * page;
      if (written.empty() || written.back().second != start) written.emplace_back(start, start);
      written.back().second = std::min(start + page, nbytes);
    }
    done += count;
  }
  return written;
}

void drop_pages(std::byte* view, std::size_t nbytes) {
  if (madvise(view, nbytes, MADV_DONTNEED) != 0) {  // of locked memory, as by mlockall
    throw shared_memory_failure("cannot drop what was written into a view of shared memory");
  }
}
}  // namespace sdp
