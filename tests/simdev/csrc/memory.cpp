// Device memory: mapped twice, once for pointers (no access) and once for kernels, and handed out
// by a caching allocator that keeps a pool per stream as CUDA's does.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <set>
#include <stdexcept>

namespace simdev {

struct Block {
  int device;
  Stream* stream;
  size_t offset;
  size_t nbytes;
  std::set<Stream*> used_on;  // by record_stream
  std::list<MarkPtr> pending;
  uint64_t generation;
};

namespace {

constexpr size_t kArena = size_t{64} << 30;  // of addresses; memory is used as it is written
constexpr size_t kUnit = 512;
constexpr int kPoison = 0x7f;  // 3.4e38 as float or bfloat16, NaN as half, a huge index

struct Arena {
  char* base = nullptr;   // what pointers say: no access
  char* alias = nullptr;  // the same memory for kernels
  std::map<size_t, size_t> free{{0, kArena}};
  size_t allocated = 0;
  size_t peak = 0;
  size_t reserved = 0;
  std::map<Stream*, std::multimap<size_t, Block*>> pools;
  std::list<Block*> waiting;  // freed, but recorded streams are not past yet
};

struct Memory {
  std::mutex mutex;
  std::array<Arena, kDevices> arenas;
  uint64_t generation;
};

std::atomic<Memory*> g_memory{nullptr};
std::atomic<uint64_t> g_generation{1};
std::atomic<bool> g_poison_late{false};
std::mutex* g_creation = new std::mutex;

void map_arena(Arena& arena) {
  int fd = memfd_create("simdev", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, kArena) != 0) throw std::runtime_error("simdev: memfd failed");
  void* base = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  void* alias = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (base == MAP_FAILED || alias == MAP_FAILED) throw std::runtime_error("simdev: mmap failed");
  // A forked child must not write into its parent's device.
  madvise(base, kArena, MADV_DONTFORK);
  madvise(alias, kArena, MADV_DONTFORK);
  arena.base = static_cast<char*>(base);
  arena.alias = static_cast<char*>(alias);
}

Memory& memory() {
  Memory* found = g_memory.load();
  if (found != nullptr) return *found;
  std::lock_guard<std::mutex> lock(*g_creation);
  if (g_memory.load() == nullptr) {
    auto* made = new Memory();
    made->generation = g_generation.load();
    for (Arena& arena : made->arenas) map_arena(arena);
    g_memory.store(made);
  }
  return *g_memory.load();
}

void poison(Block* block) {
  char* at = memory().arenas[block->device].alias + block->offset;
  size_t nbytes = block->nbytes;
  Runtime::get().enqueue(block->stream, Kind::kInternal, "poisons freed memory",
                         [at, nbytes] { std::memset(at, kPoison, nbytes); });
}

void to_pool(Arena& arena, Block* block) {
  if (!g_poison_late) poison(block);
  // Equal keys stay in order of insertion: put the newest first, to be reused first.
  auto& pool = arena.pools[block->stream];
  pool.emplace_hint(pool.lower_bound(block->nbytes), block->nbytes, block);
}

void collect(Arena& arena) {
  for (auto it = arena.waiting.begin(); it != arena.waiting.end();) {
    Block* block = *it;
    bool past = std::all_of(block->pending.begin(), block->pending.end(),
                            [](const MarkPtr& each) { return Runtime::get().is_done(each); });
    if (past) {
      block->pending.clear();
      to_pool(arena, block);
      it = arena.waiting.erase(it);
    } else {
      ++it;
    }
  }
}

Block* from_pool(Arena& arena, Stream* stream, size_t nbytes) {
  auto& pool = arena.pools[stream];
  auto found = pool.lower_bound(nbytes);
  if (found == pool.end() || found->first > 2 * nbytes) return nullptr;
  Block* block = found->second;
  pool.erase(found);
  if (g_poison_late) poison(block);
  return block;
}

Block* from_arena(Memory& memory, Arena& arena, Stream* stream, size_t nbytes) {
  for (auto& [offset, size] : arena.free) {
    if (size < nbytes) continue;
    auto* block = new Block{stream->device, stream, offset, nbytes, {}, {}, memory.generation};
    if (size > nbytes) arena.free[offset + nbytes] = size - nbytes;
    arena.free.erase(block->offset);
    arena.reserved += nbytes;
    poison(block);  // new memory would be zero, which hides that nobody has written it
    return block;
  }
  throw std::runtime_error("simdev: out of memory");
}

void to_arena(Arena& arena, size_t offset, size_t nbytes) {
  arena.reserved -= nbytes;
  madvise(arena.alias + offset, (nbytes / 4096) * 4096, MADV_REMOVE);
  auto next = arena.free.lower_bound(offset);
  if (next != arena.free.end() && offset + nbytes == next->first) {
    nbytes += next->second;
    next = arena.free.erase(next);
  }
  if (next != arena.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += nbytes;
      return;
    }
  }
  arena.free[offset] = nbytes;
}

}  // namespace

void set_poison_late(bool late) {
  g_poison_late = late;
}

void* allocate(Stream* stream, size_t nbytes, Block** block) {
  size_t unit = nbytes < 4096 ? kUnit : 4096;  // pages, so that empty_cache can give them back
  size_t rounded = std::max(kUnit, (nbytes + unit - 1) / unit * unit);
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  Arena& arena = all.arenas[stream->device];
  collect(arena);
  *block = from_pool(arena, stream, rounded);
  if (*block == nullptr) *block = from_arena(all, arena, stream, rounded);
  arena.allocated += (*block)->nbytes;
  arena.peak = std::max(arena.peak, arena.allocated);
  return arena.base + (*block)->offset;
}

void free_block(void* pointer) noexcept {
  auto* block = static_cast<Block*>(pointer);
  if (block->generation != g_generation.load()) return;  // this is a forked child
  Memory& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  Arena& arena = all.arenas[block->device];
  arena.allocated -= block->nbytes;
  if (block->used_on.empty()) {
    to_pool(arena, block);
    return;
  }
  for (Stream* stream : block->used_on) block->pending.push_back(Runtime::get().mark(stream));
  block->used_on.clear();
  arena.waiting.push_back(block);
}

void record_stream(void* pointer, Stream* stream) {
  auto* block = static_cast<Block*>(pointer);
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (block->stream != stream) block->used_on.insert(stream);
}

size_t allocated_bytes(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().arenas[device].allocated;
}

size_t reserved_bytes(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().arenas[device].reserved;
}

size_t peak_bytes(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().arenas[device].peak;
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  Arena& arena = memory().arenas[device];
  arena.peak = arena.allocated;
}

void empty_cache() {
  for (int device = 0; device < kDevices; ++device) {
    std::map<Stream*, std::multimap<size_t, Block*>> pools;
    {
      std::lock_guard<std::mutex> lock(memory().mutex);
      Arena& arena = memory().arenas[device];
      collect(arena);
      pools.swap(arena.pools);  // nobody gets these from now on
    }
    try {
      for (auto& [stream, pool] : pools) {
        if (!pool.empty()) Runtime::get().host_wait(Runtime::get().mark(stream), device);
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(memory().mutex);
      for (auto& [stream, pool] : pools) memory().arenas[device].pools[stream].merge(pool);
      throw;
    }
    std::lock_guard<std::mutex> lock(memory().mutex);
    for (auto& [stream, pool] : pools) {
      for (auto& [nbytes, block] : pool) {
        to_arena(memory().arenas[device], block->offset, nbytes);
        delete block;
      }
    }
  }
}

void forget_memory() {
  g_memory.store(nullptr);
  g_generation.fetch_add(1);
  g_creation = new std::mutex;
}

int device_of(const void* pointer) {
  Memory* all = g_memory.load();
  auto* at = static_cast<const char*>(pointer);
  for (int device = 0; all != nullptr && device < kDevices; ++device) {
    char* base = all->arenas[device].base;
    if (at >= base && at < base + kArena) return device;
  }
  return -1;
}

void* alias_of(const void* pointer) {
  if (pointer == nullptr) return nullptr;
  int device = device_of(pointer);
  if (device < 0) throw std::runtime_error("simdev: not device memory of this process");
  Arena& arena = memory().arenas[device];
  return arena.alias + (static_cast<const char*>(pointer) - arena.base);
}

}  // namespace simdev
