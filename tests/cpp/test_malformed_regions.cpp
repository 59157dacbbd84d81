// Like test_malformed_announcements.cpp, for messages about registered memory and places in it.
#include <fcntl.h>

#include <algorithm>

#include "check.hpp"
#include "malformed.hpp"
#include "ranks.hpp"

using namespace sdp;
using namespace malformed;
using ranks::expect_failure;
using ranks::Rank;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
struct Message {
  std::uint64_t region, nbytes, file_offset, with_view = 0;
};

void send_message(int socket, const void* data, std::size_t nbytes, int file) {
  CHECK_EQ(ranks::send_message(socket, data, nbytes, file), static_cast<ssize_t>(nbytes));
}

// Rank 0 reduces registered memory; rank 1 says `message`, attaches `file`, and claims that its
// buffer lies in `runs`.
std::optional<Failure> meet_region(const void* message, std::size_t nbytes, int file,
                                   const std::vector<Run>& runs) {
  World world(2);
  const auto memory = world[0].communicator->allocate(kLarge * 4);
  send_message(world[1].communicator->peers().socket(0), message, nbytes, file);
  const Segment& theirs = world[1].communicator->peers().own();
  Request request = ranks::in_place(Op::all_reduce, DType::int32, {memory.data, kLarge});
  Announcement& announcement = theirs.announcement(1);
  announcement.seq = 1;
  announcement.operation = request.signature();
  announcement.runs = static_cast<std::uint16_t>(runs.size());
  std::copy_n(runs.begin(), std::min(runs.size(), kMostRuns), theirs.runs(1));
  announcement.region_version = 1;
  theirs.header().step.publish(1'000);
  request.timeout_s = 0.3;
  return world.failures([&](int r, Rank& rank) {
    if (r == 0) rank.run(request);
  })[0];
}
}  // namespace

TEST(an_honest_region_passes) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const Message message{7, kLarge * 4, 0};
  const auto failure = meet_region(&message, sizeof message, file.get(), {{7, 0, kLarge}});
  CHECK_EQ(failure ? failure->what() : std::string(), "");
}

TEST(messages_of_another_size) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  std::vector<std::byte> bytes(200, std::byte{1});
  for (std::size_t nbytes : {1, 8, 31, 33, 200}) {
    for (int attached : {-1, file.get()}) {
      const int before = ranks::open_files();
      expect_failure(meet_region(bytes.data(), nbytes, attached, {{7, 0, kLarge}}),
                     FailureKind::mismatch,
                     "rank 1 sent a malformed message about registered memory");
      CHECK_EQ(ranks::open_files(), before);
    }
  }
}

TEST(regions_without_a_file_or_beyond_its_end) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const auto claim = [&](Message message, int attached) {
    return meet_region(&message, sizeof message, attached, {{7, 0, kLarge}});
  };
  expect_failure(claim({7, kLarge * 4, 0}, -1), FailureKind::mismatch, "without a file");
  for (Message message : {Message{7, kLarge * 4 + 1, 0}, Message{7, kMost, 0}, Message{7, kMost, 1},
                          Message{7, kLarge * 4, 4096}, Message{7, kLarge * 4, 0 - 4096ull}}) {
    expect_failure(claim(message, file.get()), FailureKind::shared_memory,
                   "a shared memory file holds");
  }
  expect_failure(claim({7, 4096, 1}, file.get()), FailureKind::shared_memory, "cannot map");
  const FileDescriptor directory(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  expect_failure(claim({7, kLarge * 4, 0}, directory.get()), FailureKind::shared_memory, "");
}

TEST(places_outside_of_the_region) {
  const FileDescriptor file = ranks::file_of(kLarge * 4 + 4096);
  const Message message{7, kLarge * 4 + 4096, 0};
  const auto claim = [&](RegionPlace place) {
    return meet_region(&message, sizeof message, file.get(),
                       {{place.region, place.offset, kLarge}});
  };
  CHECK(!claim({7, 4096}));
  const char* outside = "rank 1 sent a range outside its region";
  for (std::uint64_t offset : {std::uint64_t{4097}, kHuge, kMost, 0 - std::uint64_t{4096}}) {
    expect_failure(claim({7, offset}), FailureKind::mismatch, outside);
  }
  for (std::uint64_t region : {std::uint64_t{0}, std::uint64_t{8}, kMost}) {
    expect_failure(claim({region, 0}), FailureKind::mismatch,
                   "rank 1 announced memory that it has not registered");
  }
}

TEST(runs_that_are_not_the_buffer) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const Message message{7, kLarge * 4, 0};
  const auto claim = [&](const std::vector<Run>& runs) {
    return meet_region(&message, sizeof message, file.get(), runs);
  };
  const std::uint64_t half = kLarge / 2;
  CHECK(!claim({{7, half * 4, half}, {7, 0, half}}));
  CHECK(!claim({{7, 0, 0}, {7, 0, kLarge}, {7, kLarge * 4, 0}}));
  const char* impossible = "rank 1 announced impossible pieces";
  for (const std::vector<Run>& runs : std::vector<std::vector<Run>>{
           {{7, 0, kLarge - 1}},
           {{7, 0, kLarge + 1}},
           {{7, 0, kMost}},
           {{7, 0, kHuge}},
           {{7, 0, half}, {7, half * 4, half - 1}},
           {{7, 0, half}, {7, half * 4, half}, {7, 0, 1}},
           {{7, 0, half}, {7, half * 4, kMost}, {7, 0, half + 1}},  // as many, in 64 bits
           std::vector<Run>(kMostRuns + 1, {7, 0, 1}),
       }) {
    expect_failure(claim(runs), FailureKind::mismatch, impossible);
  }
  expect_failure(claim({{7, 0, half}, {8, 0, half}}), FailureKind::mismatch,
                 "rank 1 announced memory that it has not registered");
  expect_failure(claim({{7, 0, half}, {7, half * 4 + 4, half}}), FailureKind::mismatch,
                 "rank 1 sent a range outside its region");
}

TEST(a_region_that_was_taken_back) {
  World world(2);
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const int socket = world[1].communicator->peers().socket(0);
  const Message messages[] = {{7, kLarge * 4, 0}, {7, 0, 0}, {9, 0, 0}};
  send_message(socket, &messages[0], sizeof(Message), file.get());
  send_message(socket, &messages[1], sizeof(Message), -1);
  send_message(socket, &messages[2], sizeof(Message), -1);  // never heard of: no matter
  Regions& regions = world[0].communicator->regions();
  regions.sync(1, 1);
  CHECK(regions.address(1, {7, 0}, 4) == nullptr);
}
