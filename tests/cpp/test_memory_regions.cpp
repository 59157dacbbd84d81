// Registered memory: told to the peers, mapped by them, used in place; and every way back from it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"
#include "written_pages.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;

namespace {
constexpr std::size_t kCount = 20'000;  // of 8 bytes: large enough to be used in place
constexpr std::size_t kBytes = kCount * sizeof(std::int64_t);

std::int64_t* ints(std::byte* memory) {
  return reinterpret_cast<std::int64_t*>(memory);
}

void fill(std::int64_t* data, std::size_t count, int r) {
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::int64_t>(i) * (r + 1);
}

// One all_reduce of `count` elements at `data`; checks the sum and returns the path that was taken.
Path reduce_at(Rank& rank, std::int64_t* data, std::size_t count, int world) {
  fill(data, count, rank.communicator->rank());
  rank.run(
      ranks::in_place(Op::all_reduce, DType::int64, {reinterpret_cast<std::byte*>(data), count}));
  const std::int64_t factor = world * (world + 1) / 2;
  for (std::size_t i = 0; i < count; ++i) CHECK_EQ(data[i], static_cast<std::int64_t>(i) * factor);
  return rank.communicator->last_path();
}

// A user's own shared memory, as a tensor's storage has it.
struct OwnMemory {
  explicit OwnMemory(std::size_t nbytes) : file(memfd_create("sdp-test", MFD_CLOEXEC)) {
    CHECK_EQ(ftruncate(file.get(), static_cast<off_t>(nbytes)), 0);
    mapping = Mapping(file.get(), nbytes, 0, false);
  }
  FileDescriptor file;
  Mapping mapping;
};
}  // namespace

TEST(allocated_memory_is_zero_filled_and_reduced_in_place) {
  for (int size = 1; size <= 4; ++size) {
    World world(size);
    world.each([&](int, Rank& rank) {
      const auto memory = rank.communicator->allocate(kBytes);
      for (std::size_t i = 0; i < kBytes; ++i) CHECK(memory.data[i] == std::byte{});
      for (std::size_t count : {kCount, kCount - 1, std::size_t{4097}}) {
        CHECK(reduce_at(rank, ints(memory.data), count, size) == Path::zero_copy);
      }
    });
  }
}

TEST(a_part_of_a_region_is_reduced_in_place) {
  World world(3);
  world.each([&](int r, Rank& rank) {
    const auto memory = rank.communicator->allocate(2 * kBytes);
    // Not even the offsets need to agree.
    std::int64_t* data = ints(memory.data) + 7 * (r + 1);
    CHECK(reduce_at(rank, data, kCount, 3) == Path::zero_copy);
    CHECK_EQ(data[-1], 0);
    CHECK_EQ(data[kCount], 0);
  });
}

TEST(memory_that_was_freed_before_peers_saw_it_is_not_mapped) {
  World world(2);
  OwnMemory own(kBytes);
  auto& communicator = *world[1].communicator;
  communicator.regions().remove(
      communicator.add_region(own.mapping.data(), kBytes, own.file.get(), 0));
  CHECK_EQ(ftruncate(own.file.get(), 0), 0);  // no longer can it be mapped
  world.each([](int, Rank& rank) { rank.run(ranks::request(Op::barrier, DType::uint8)); });
}

TEST(memory_that_cannot_be_mapped_fails_the_operation_by_name) {
  World world(2);
  OwnMemory own(kBytes);
  world[1].communicator->add_region(own.mapping.data(), kBytes, own.file.get(), 0);
  CHECK_EQ(ftruncate(own.file.get(), 0), 0);
  const auto failures =
      world.failures([](int, Rank& rank) { rank.run(ranks::request(Op::barrier, DType::uint8)); });
  ranks::expect_failure(failures[0], FailureKind::shared_memory, "(memory of rank 1)");
  ranks::expect_failure(failures[0], FailureKind::shared_memory, "barrier #1");
}

TEST(beyond_the_region_it_is_staged) {
  World world(2);
  world.each([&](int, Rank& rank) {
    OwnMemory own(2 * kBytes);
    rank.communicator->regions().add(own.mapping.data(), kBytes, own.file.get(), 0);
    std::int64_t* data = ints(own.mapping.data());
    CHECK(reduce_at(rank, data, kCount, 2) == Path::zero_copy);
    CHECK(reduce_at(rank, data + 1, kCount, 2) == Path::staged);
    rank.run(ranks::request(Op::barrier, DType::uint8));
  });
}

TEST(one_unregistered_buffer_makes_all_ranks_stage) {
  World world(3);
  world.each([&](int r, Rank& rank) {
    const auto memory = rank.communicator->allocate(kBytes);
    std::vector<std::int64_t> plain(kCount);
    std::int64_t* data = r == 1 ? plain.data() : ints(memory.data);
    CHECK(reduce_at(rank, data, kCount, 3) == Path::staged);
    CHECK(reduce_at(rank, ints(memory.data), kCount, 3) == Path::zero_copy);
  });
}

TEST(a_region_may_start_anywhere_in_its_file) {
  World world(2);
  world.each([&](int, Rank& rank) {
    OwnMemory own(kBytes + 3 * 4096);
    const Mapping window(own.file.get(), kBytes, 2 * 4096, false);
    rank.communicator->regions().add(window.data(), kBytes, own.file.get(), 2 * 4096);
    CHECK(reduce_at(rank, ints(window.data()), kCount, 2) == Path::zero_copy);
    rank.run(ranks::request(Op::barrier, DType::uint8));
  });
}

TEST(a_peer_s_region_can_be_mapped_and_outlives_the_peer_s_own) {
  World world(2);
  world.each([&](int r, Rank& rank) {
    const auto meet = [&] { rank.run(ranks::request(Op::barrier, DType::uint8)); };
    auto& communicator = *rank.communicator;
    const auto memory = communicator.allocate(kBytes);
    meet();
    const auto mapping = communicator.regions().mapping(1 - r, memory.region);
    CHECK(mapping != nullptr);
    CHECK(communicator.regions().mapping(1 - r, memory.region + 1) == nullptr);
    ints(memory.data)[kCount / 2] = r + 1;
    meet();
    const std::int64_t* theirs = ints(mapping->shared.data());
    CHECK_EQ(theirs[kCount / 2], 2 - r);
    meet();
    give_back_pages(memory.data, kBytes);
    meet();
    CHECK_EQ(theirs[kCount / 2], 0);
    meet();
    ints(memory.data)[kCount / 2] = 5;
    meet();
    communicator.release(memory.region);
    meet();
    meet();
    CHECK(communicator.regions().mapping(1 - r, memory.region) == nullptr);
    CHECK_EQ(theirs[kCount / 2], 5);
  });
}

TEST(released_memory_is_not_used_in_place_and_ids_are_never_used_twice) {
  World world(2);
  world.each([&](int, Rank& rank) {
    std::uint64_t last = 0;
    for (int round = 0; round < 20; ++round) {
      const auto memory = rank.communicator->allocate(kBytes);
      CHECK(memory.region > last);
      last = memory.region;
      CHECK(reduce_at(rank, ints(memory.data), kCount, 2) == Path::zero_copy);
      rank.communicator->release(memory.region);
    }
    std::vector<std::int64_t> plain(kCount);
    CHECK(reduce_at(rank, plain.data(), kCount, 2) == Path::staged);
    rank.communicator->release(last);  // again: nothing happens
    rank.communicator->release(12345);
    CHECK(reduce_at(rank, plain.data(), kCount, 2) == Path::staged);
  });
}

TEST(a_group_s_memory_and_files_end_with_it) {
  const int before = ranks::open_files();
  {
    World world(3);
    world.each([&](int, Rank& rank) {
      for (int i = 0; i < 5; ++i) rank.communicator->allocate(kBytes);
    });
  }
  CHECK_EQ(ranks::open_files(), before);
}

// Messages about regions are never waited for: what does not fit into a peer's socket is told
// later, and until then the memory is staged like any other.
TEST(more_news_than_a_socket_holds) {
  constexpr std::size_t kRegions = 350;
  World world(2);
  world.each([&](int, Rank& rank) {
    OwnMemory own(kRegions * 4096 + kBytes);
    Regions& regions = rank.communicator->regions();
    std::byte* const end = own.mapping.data() + kRegions * 4096;
    for (std::size_t i = 0; i < kRegions; ++i) {
      regions.add(own.mapping.data() + i * 4096, 4096, own.file.get(), i * 4096);
    }
    regions.add(end, kBytes, own.file.get(), kRegions * 4096);
    Path path = reduce_at(rank, ints(end), kCount, 2);
    for (int round = 0; round < 10 && path != Path::zero_copy; ++round) {
      path = reduce_at(rank, ints(end), kCount, 2);
    }
    CHECK(path == Path::zero_copy);
    rank.run(ranks::request(Op::barrier, DType::uint8));
  });
}

TEST(a_file_that_cannot_be_shared_is_the_caller_s_failure_only) {
  World world(2);
  world.each([&](int, Rank& rank) {
    std::vector<std::int64_t> data(kCount);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    Regions& regions = rank.communicator->regions();
    CHECK_THROWS(regions.add(bytes, kBytes, -1, 0), Failure, "cannot share a memory file: Bad");
    CHECK_THROWS(regions.add(bytes, kBytes, 99999, 0), Failure, "cannot share a memory file: Bad");
    CHECK_THROWS(regions.add(bytes, 0, 0, 0), std::invalid_argument, "must not be empty");
    CHECK(reduce_at(rank, data.data(), kCount, 2) == Path::staged);
  });
}

TEST(memory_that_cannot_be_had_is_a_failure_of_the_call_only) {
  World world(2);
  world.each([&](int, Rank& rank) {
    CHECK_THROWS(rank.communicator->allocate(std::size_t{1} << 62), Failure, "shared memory");
    CHECK_THROWS(rank.communicator->allocate(0), Failure, "0 bytes of shared memory");
    std::vector<std::int64_t> data(kCount);
    CHECK(reduce_at(rank, data.data(), kCount, 2) == Path::staged);
  });
}

// Without an operation nobody reads the news: what waits to be told must not pile up.
TEST(regions_that_come_and_go_unused_hold_no_files) {
  World world(2);
  const int before = ranks::open_files();
  for (int i = 0; i < 3000; ++i) {
    world[0].communicator->release(world[0].communicator->allocate(4096).region);
  }
  CHECK(ranks::open_files() < before + 10);
  world.each([&](int, Rank& rank) {
    const auto memory = rank.communicator->allocate(kBytes);
    for (int round = 0; round < 10; ++round) reduce_at(rank, ints(memory.data), kCount, 2);
    CHECK(rank.communicator->last_path() == Path::zero_copy);
  });
}

// Registration comes from one thread while another one's operations run.
TEST(regions_come_and_go_beside_running_operations) {
  World world(2);
  std::atomic<bool> running{true};
  std::vector<std::thread> registrars;
  std::atomic<int> failed{0};
  for (int r = 0; r < 2; ++r) {
    registrars.emplace_back([&, r] {
      try {
        while (running.load()) {
          const auto memory = world[r].communicator->allocate(kBytes);
          world[r].communicator->release(memory.region);
          std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
      } catch (const Failure&) {
        ++failed;
      }
    });
  }
  const auto failures = world.failures([&](int, Rank& rank) {
    const auto memory = rank.communicator->allocate(kBytes);
    for (int i = 0; i < 30; ++i) reduce_at(rank, ints(memory.data), kCount, 2);
  });
  running = false;
  for (auto& registrar : registrars) registrar.join();
  CHECK_EQ(failed.load(), 0);
  for (const auto& failure : failures) CHECK_EQ(failure ? failure->what() : std::string(), "");
}

// The peers of a rank that was stopped have given up and freed their memory when it goes on: it
// must tell why they did, not that it does not know their memory.
TEST(memory_that_peers_gave_up_with_the_group) {
  for (Op op : {Op::all_reduce, Op::broadcast}) {
    World world(3);
    std::vector<Communicator::Shared> memory(3);
    const auto run_at = [&](int r, Rank& rank, double timeout_s) {
      const Piece piece{memory[static_cast<std::size_t>(r)].data, kCount};
      Request request = ranks::in_place(op, DType::int64, piece, op == Op::broadcast ? 0 : -1);
      request.timeout_s = timeout_s;
      if (op == Op::broadcast) request.part = Part{.operation = {.op = Op::broadcast, .seq = 7}};
      rank.run(std::move(request));
    };
    world.each([&](int r, Rank& rank) {
      auto& mine = memory[static_cast<std::size_t>(r)];
      mine = rank.communicator->allocate(kBytes);
      run_at(r, rank, ranks::kTimeoutS);
      CHECK(rank.communicator->last_path() == Path::zero_copy);
      mine = rank.communicator->allocate(kBytes);  // news for the next operation
    });
    const auto early = world.failures([&](int r, Rank& rank) {
      if (r == 2) return;
      try {
        run_at(r, rank, 0.2);
      } catch (const Failure&) {
        rank.communicator->release(memory[static_cast<std::size_t>(r)].region);
        throw;
      }
    });
    CHECK(early[0] && early[1]);
    const auto late = world.failures([&](int r, Rank& rank) {
      if (r == 2) run_at(r, rank, ranks::kTimeoutS);
    });
    CHECK(late[2].has_value());
    CHECK_EQ(late[2]->kind, FailureKind::timeout);
    CHECK_EQ(late[2]->ranks, std::vector<int>{2});
    CHECK(std::string(late[2]->what()).find(" gave up: ") != std::string::npos);
  }
}

TEST(a_view_shows_the_memory_and_keeps_its_writes) {
  using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t size = 9 * page + 100;
  World world(2);
  const auto own = world[0].communicator->allocate(size, true);
  world.each([&](int, Rank& rank) {
    std::vector<std::int64_t> values(8);
    reduce_at(rank, values.data(), values.size(), 2);  // tells of the region
  });
  const auto peer = world[1].communicator->regions().mapping(0, own.region);
  CHECK(peer != nullptr);
  std::byte* const view = peer->view.data();
  own.data[5] = std::byte{1};
  CHECK(view[5] == std::byte{1} && own.view[5] == std::byte{1});
  peer->shared.data()[size - 1] = std::byte{2};
  CHECK(view[size - 1] == std::byte{2} && own.view[size - 1] == std::byte{2});
  CHECK(written_pages(view, size).empty());

  view[page] = view[2 * page - 1] = view[3 * page] = view[size - 1] = std::byte{3};
  CHECK(own.data[page] == std::byte{} && own.view[page] == std::byte{});
  own.data[page + 1] = std::byte{4};
  CHECK(view[page + 1] == std::byte{});  // of before the write
  const Ranges written{{page, 2 * page}, {3 * page, 4 * page}, {size / page * page, size}};
  CHECK(written_pages(view, size) == written);
  CHECK(written_pages(own.view, size).empty());
  drop_pages(view + page, page);
  CHECK(view[page] == std::byte{} && view[page + 1] == std::byte{4});
  CHECK(view[3 * page] == std::byte{3});
  CHECK_EQ(written_pages(view, size).size(), 2);
}
