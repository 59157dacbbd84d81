// Where things lie in a segment, what may be mapped, and whom a rank accepts as its peer.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <limits>

#include "check.hpp"
#include "peers.hpp"
#include "ranks.hpp"

using namespace sdp;

namespace {
struct Area {
  std::size_t begin, nbytes, align;
};

std::vector<Area> areas(const Layout& layout, int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  std::vector<Area> all{{0, sizeof(Header), alignof(Header)}};
  for (int parity : {0, 1})
    all.push_back({layout.announcement(parity), sizeof(Announcement), kAlign});
  for (int parity : {0, 1}) all.push_back({layout.splits(parity), world * 8, kAlign});
  for (int parity : {0, 1}) all.push_back({layout.expected(parity), world * 8, kAlign});
  for (int parity : {0, 1}) all.push_back({layout.runs(parity), kMostRuns * sizeof(Run), kAlign});
  for (int parity : {0, 1}) all.push_back({layout.inline_payload(parity), kInlineBytes, kAlign});
  for (int slot = 0; slot < kSlots; ++slot) {
    all.push_back({layout.slot(slot), layout.slot_bytes(), kAlign});
  }
  for (int r = 0; r < world_size; ++r) {
    all.push_back({layout.ring_control(r), sizeof(RingControl), alignof(RingControl)});
  }
  for (int r = 0; r < world_size; ++r) all.push_back({layout.ring_data(r), kRingBytes, kAlign});
  all.push_back({layout.flight(), sizeof(FlightArea), kAlign});
  return all;
}

// Rank 0's view of a pair in which somebody has changed rank 1's header.
template <class Change>
void meet(Change&& change) {
  ranks::Links links(2, ranks::kStagingBytes);
  const Layout layout(2, ranks::kStagingBytes);
  {
    const Mapping mapping(links.segment_fd(1), layout.total(), 0, false);
    change(*reinterpret_cast<Header*>(mapping.data()));
  }
  Peers(links.take(0), ranks::kStagingBytes);
}
}  // namespace

TEST(areas_follow_each_other_aligned_without_overlap) {
  for (int world = 1; world <= 65; ++world) {
    for (std::size_t staging : {std::size_t{0}, std::size_t{1}, std::size_t{4096},
                                std::size_t{3} << 20, std::size_t{24} << 20}) {
      const Layout layout(world, staging);
      std::size_t end = 0;
      for (const Area& area : areas(layout, world)) {
        CHECK(area.begin >= end);
        CHECK_EQ(area.begin % area.align, 0);
        end = area.begin + area.nbytes;
      }
      CHECK(end <= layout.total());
    }
  }
}

TEST(a_slot_has_an_aligned_piece_for_every_rank) {
  for (int world = 1; world <= 65; ++world) {
    for (std::size_t staging : {0, 1, 1000, 100'000}) {
      const Layout layout(world, staging);
      CHECK(layout.slot_bytes() > 0);  // rounds are counted by it
      CHECK(layout.slot_bytes() >= staging / kSlots);
      CHECK_EQ(layout.slot_bytes() % (static_cast<std::size_t>(world) * kAlign), 0);
    }
  }
}

TEST(mappings_share_memory_and_move) {
  const FileDescriptor file = ranks::file_of(8192);
  Mapping a(file.get(), 8192, 0, true);
  Mapping b(file.get(), 4096, 4096, false);
  a.data()[4096] = std::byte{42};
  CHECK(b.data()[0] == std::byte{42});
  Mapping moved(std::move(a));
  CHECK_EQ(moved.nbytes(), 8192);
  CHECK(moved.data()[4096] == std::byte{42});
  b = std::move(moved);
  CHECK_EQ(b.nbytes(), 8192);
}

TEST(nothing_is_mapped_beyond_the_end_of_its_file) {
  const FileDescriptor file = ranks::file_of(8192);
  const std::size_t most = std::numeric_limits<std::size_t>::max();
  const auto map = [&](std::size_t nbytes, std::size_t offset) {
    Mapping(file.get(), nbytes, offset, false);
  };
  const char* refused = "a shared memory file holds 8192 bytes, but ";
  CHECK_THROWS(map(8193, 0), Failure, refused);
  CHECK_THROWS(map(4097, 4096), Failure, refused);
  CHECK_THROWS(map(1, 8192), Failure, refused);
  CHECK_THROWS(map(most, 0), Failure, refused);
  CHECK_THROWS(map(4096, most - 4095), Failure, refused);  // the sum wraps to 0
  CHECK_THROWS(map(8192, most - 4095), Failure, refused);  // and to 4096
  CHECK_THROWS(map(most, 1), Failure, refused);
  CHECK_THROWS(map(0, 0), Failure, "cannot map 0 bytes");
  CHECK_THROWS(map(100, 1), Failure, "cannot map 100 bytes");  // not on a page
}

TEST(only_files_are_mapped) {
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const FileDescriptor a(pair[0]), b(pair[1]);
  CHECK_THROWS(Mapping(a.get(), 4096, 0, false), Failure, "shared memory");
  CHECK_THROWS(Mapping(-1, 4096, 0, false), Failure, "shared memory");
}

TEST(descriptors_are_closed_once) {
  const int before = ranks::open_files();
  {
    FileDescriptor file(memfd_create("sdp-test", MFD_CLOEXEC));
    FileDescriptor other(std::move(file));
    CHECK_EQ(file.get(), -1);
    file = std::move(other);
    CHECK_EQ(ranks::open_files(), before + 1);
  }
  CHECK_EQ(ranks::open_files(), before);
}

TEST(peers_with_another_layout_are_refused) {
  meet([](Header&) {});
  const char* refused = "rank 1 has another memory layout. Hint: use the same version";
  CHECK_THROWS(meet([](Header& header) { header.magic ^= 1; }), Failure, refused);
  CHECK_THROWS(meet([](Header& header) { header.rank = 0; }), Failure, refused);
  CHECK_THROWS(meet([](Header& header) { header.world_size = 3; }), Failure, refused);
  CHECK_THROWS(meet([](Header& header) { header.staging_bytes += 1; }), Failure, refused);
}

TEST(a_segment_that_is_too_short_is_refused) {
  ranks::Links links(2, ranks::kStagingBytes);
  CHECK_EQ(ftruncate(links.segment_fd(1), 4096), 0);
  CHECK_THROWS(Peers(links.take(0), ranks::kStagingBytes), Failure, "holds 4096 bytes");
}

TEST(refusals_and_good_byes_leave_no_file_open) {
  const int before = ranks::open_files();
  try {
    meet([](Header& header) { header.magic = 0; });
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.kind == FailureKind::mismatch);
    CHECK(failure.ranks == std::vector<int>{1});
  }
  CHECK_EQ(ranks::open_files(), before);
  {
    ranks::World world(4);
  }
  CHECK_EQ(ranks::open_files(), before);
}
