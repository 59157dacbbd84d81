// Large aligned blocks of the C library's allocator, in one memory file that peers can map.
//
// A library of its own, for LD_PRELOAD: its functions stand before those of the C library, to which
// they pass every call until sdp_shared_malloc_open. From then on blocks of at least 1 MiB lie in
// the file that posix_memalign, aligned_alloc or memalign allocate for code in the ranges that were
// given to sdp_shared_malloc_serve. TensorFlow and XLA allocate tensors so; their all_reduce then
// works on the tensors of all ranks in place. Freed memory stays in the file, for the next step.
// What does not fit comes from the C library.
//
// All processes of a job load this, also those of other programs: it needs the C library only.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "page_blocks.hpp"

namespace {
constexpr std::size_t kPage = 4096;
constexpr std::size_t kLeastBytes = 1 << 20;  // LARGE_NBYTES in shared_malloc.py
constexpr std::size_t kMostAlignment = 2 << 20;

// Whether this thread looks for a function of the next library. That may free the text of an
// earlier error, for which there is no function yet.
__attribute__((tls_model("initial-exec"))) thread_local bool looking_up = false;

// The function of this name in the next library.
template <class Function>
class Next {
 public:
  explicit constexpr Next(const char* name) : name_(name) {}
  Function* find() {
    Function* function = function_.load(std::memory_order_relaxed);
    if (function == nullptr && !looking_up) {
      looking_up = true;
      function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name_));
      looking_up = false;
      function_.store(function, std::memory_order_relaxed);
    }
    return function;
  }
  template <class... Arguments>
  auto operator()(Arguments... arguments) {
    return find()(arguments...);
  }

 private:
  const char* const name_;
  std::atomic<Function*> function_{nullptr};
};
constinit Next<void(void*)> next_free("free");
constinit Next<void*(void*, std::size_t)> next_realloc("realloc");
constinit Next<std::size_t(void*)> next_usable_size("malloc_usable_size");
constinit Next<int(void**, std::size_t, std::size_t)> next_posix_memalign("posix_memalign");
constinit Next<void*(std::size_t, std::size_t)> next_aligned_alloc("aligned_alloc");
constinit Next<void*(std::size_t, std::size_t)> next_memalign("memalign");

// The file's memory; never closed, since the program may hold blocks until it ends.
class File {
 public:
  // Returns 0 or an error number; not called again. The caller has the lock.
  int open(std::size_t nbytes) {
    const std::size_t pages = nbytes / kPage;
    void* const entries =
        map(pages * sizeof(std::uint32_t), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    void* const reserved = map(nbytes + kMostAlignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS);
    if (entries == MAP_FAILED || reserved == MAP_FAILED) return errno;
    fd_ = memfd_create("sdp-malloc", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) return errno;
    const auto address = reinterpret_cast<std::uintptr_t>(reserved);
    begin_ = (address + kMostAlignment - 1) / kMostAlignment * kMostAlignment;
    nbytes_ = nbytes;
    blocks_ = sdp::PageBlocks(static_cast<std::uint32_t*>(entries), pages);
    return map_file(MAP_SHARED) ? 0 : errno;
  }

  void* take(std::size_t nbytes, std::size_t alignment) {
    if (nbytes > nbytes_) return nullptr;
    const std::size_t pages = (nbytes + kPage - 1) / kPage;
    const std::size_t of_pages = alignment < kPage ? 1 : alignment / kPage;
    lock();
    const std::size_t first = forked_ ? sdp::PageBlocks::kNone : blocks_.take(pages, of_pages);
    unlock();
    if (first == sdp::PageBlocks::kNone) return nullptr;
    return reinterpret_cast<void*>(begin_ + first * kPage);
  }
  void give(void* block) {
    lock();
    const bool is_used = blocks_.used(page_of(block));
    if (is_used) blocks_.give(page_of(block));
    unlock();
    if (!is_used) abort();  // freed twice: as the C library does
  }
  std::size_t size(void* block) {
    lock();
    const std::size_t pages = blocks_.length(page_of(block));
    unlock();
    return pages * kPage;
  }
  bool holds(const void* block) const {
    return reinterpret_cast<std::uintptr_t>(block) - begin_ < nbytes_;
  }
  // Returns 0, or an error number in a forked child, whose blocks no peer sees. With the lock, too.
  int describe(void** data, std::size_t* nbytes, int* fd) const {
    if (forked_) return EPERM;
    *data = reinterpret_cast<void*>(begin_);
    *nbytes = nbytes_;
    *fd = fd_;
    return 0;
  }

  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }
  // In a forked child, which has the lock: its writes are its own from now on. Where the kernel
  // promises no more memory than there is, it may refuse that; most children need it for nothing.
  void leave() {
    forked_ = true;
    if (!map_file(MAP_PRIVATE)) mprotect(reinterpret_cast<void*>(begin_), nbytes_, PROT_NONE);
  }

 private:
  static void* map(std::size_t nbytes, int protection, int flags) {
    return mmap(nullptr, nbytes, protection, flags | MAP_NORESERVE, -1, 0);
  }
  bool map_file(int flags) {
    void* const begin = reinterpret_cast<void*>(begin_);
    return mmap(begin, nbytes_, PROT_READ | PROT_WRITE, flags | MAP_FIXED | MAP_NORESERVE, fd_,
                0) != MAP_FAILED;
  }
  std::size_t page_of(const void* block) const {
    return (reinterpret_cast<std::uintptr_t>(block) - begin_) / kPage;
  }

  std::uintptr_t begin_ = 0;
  std::size_t nbytes_ = 0;
  int fd_ = -1;
  bool forked_ = false;
  sdp::PageBlocks blocks_;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

constinit File file;
constinit std::atomic<bool> is_open{false};

struct Range {
  std::uintptr_t first, last;  // the last is not in it
};
constexpr std::size_t kMostRanges = 256;
Range served[kMostRanges];
constinit std::atomic<std::size_t> served_count{0};

bool serves(const void* code) {
  const auto address = reinterpret_cast<std::uintptr_t>(code);
  for (std::size_t i = 0, n = served_count.load(std::memory_order_acquire); i < n; ++i) {
    if (address >= served[i].first && address < served[i].last) return true;
  }
  return false;
}

bool holds(const void* block) {
  return is_open.load(std::memory_order_acquire) && file.holds(block);
}

// `code` asks for the block.
void* take(std::size_t nbytes, std::size_t alignment, const void* code) {
  if (nbytes < kLeastBytes || !is_open.load(std::memory_order_acquire)) return nullptr;
  const bool is_power_of_two = alignment != 0 && (alignment & (alignment - 1)) == 0;
  if (alignment > kMostAlignment || !is_power_of_two || !serves(code)) return nullptr;
  return file.take(nbytes, alignment);
}

// Handlers of forks that are installed first hold the lock for the shortest time: those of others
// may allocate. `free` comes first, as looking for the others may need it.
__attribute__((constructor)) void prepare() {
  next_free.find();
  next_realloc.find();
  next_usable_size.find();
  next_posix_memalign.find();
  next_aligned_alloc.find();
  next_memalign.find();
  const auto before = [] { file.lock(); };
  const auto in_parent = [] { file.unlock(); };
  const auto in_child = [] {
    if (is_open.load(std::memory_order_relaxed)) file.leave();
    file.unlock();
  };
  if (pthread_atfork(before, in_parent, in_child) != 0) abort();
}
}  // namespace

#define SDP_EXPORT extern "C" __attribute__((visibility("default")))

// Opens the file, once in a process; `nbytes` is a multiple of 2 MiB. Returns where it is mapped,
// or an error number, the same in each call.
SDP_EXPORT int sdp_shared_malloc_open(std::size_t nbytes, void** data, std::size_t* mapped,
                                      int* fd) {
  static int error = -1;
  file.lock();
  if (error < 0) {
    error = file.open(nbytes);
    is_open.store(error == 0, std::memory_order_release);
  }
  const int found = error == 0 ? file.describe(data, mapped, fd) : error;
  file.unlock();
  return found;
}

// Has code in [first, last) get large blocks in the file; a second time changes nothing. Returns 0,
// or an error number.
SDP_EXPORT int sdp_shared_malloc_serve(std::uintptr_t first, std::uintptr_t last) {
  file.lock();
  const std::size_t count = served_count.load(std::memory_order_relaxed);
  const bool is_known = serves(reinterpret_cast<void*>(first));
  if (!is_known && count < kMostRanges) {
    served[count] = {first, last};
    served_count.store(count + 1, std::memory_order_release);
  }
  file.unlock();
  return is_known || count < kMostRanges ? 0 : ENOSPC;
}

SDP_EXPORT int posix_memalign(void** block, std::size_t alignment, std::size_t nbytes) {
  const bool is_valid = alignment % sizeof(void*) == 0;
  const void* const caller = __builtin_return_address(0);
  if (void* const taken = is_valid ? take(nbytes, alignment, caller) : nullptr) {
    *block = taken;
    return 0;
  }
  return next_posix_memalign(block, alignment, nbytes);
}

SDP_EXPORT void* aligned_alloc(std::size_t alignment, std::size_t nbytes) {
  void* const taken = take(nbytes, alignment, __builtin_return_address(0));
  return taken != nullptr ? taken : next_aligned_alloc(alignment, nbytes);
}

SDP_EXPORT void* memalign(std::size_t alignment, std::size_t nbytes) {
  void* const taken = take(nbytes, alignment, __builtin_return_address(0));
  return taken != nullptr ? taken : next_memalign(alignment, nbytes);
}

SDP_EXPORT void free(void* block) {
  if (holds(block)) {
    file.give(block);
  } else if (auto* const next = next_free.find()) {
    next(block);
  }
}

SDP_EXPORT void* realloc(void* block, std::size_t nbytes) {
  if (!holds(block)) return next_realloc(block, nbytes);
  void* const moved = nbytes == 0 ? nullptr : malloc(nbytes);
  if (moved == nullptr && nbytes != 0) return nullptr;
  const std::size_t held = file.size(block);
  if (moved != nullptr) memcpy(moved, block, held < nbytes ? held : nbytes);
  file.give(block);
  return moved;
}

SDP_EXPORT std::size_t malloc_usable_size(void* block) {
  return holds(block) ? file.size(block) : next_usable_size(block);
}
