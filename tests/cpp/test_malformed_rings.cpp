// Like test_malformed_announcements.cpp, for the rings that carry messages.
#include "check.hpp"
#include "malformed.hpp"
#include "ranks.hpp"

using namespace sdp;
using namespace malformed;
using ranks::expect_failure;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
struct Frame {
  std::uint64_t nbytes;
  std::uint32_t tag;
  std::uint32_t dtype;
};

// Rank 0 waits for a message from rank 1, whose ring holds what `write` makes of it.
template <class Write>
std::optional<Failure> receive(Write&& write, std::uint32_t tag = 0, double timeout_s = 0.3) {
  World world(2);
  const Segment& theirs = world[1].communicator->peers().own();
  Ints buffer(4);
  Request request = ranks::recv(DType::int32, ranks::piece(buffer), 1, tag);
  request.timeout_s = timeout_s;
  write(theirs.ring(0), theirs.ring_data(0));
  const auto work = world[0].post(std::move(request));
  return ranks::failure_of(*work);
}

std::optional<Failure> receive_frame(const Frame& frame, std::uint32_t tag = 0) {
  return receive(
      [&](RingControl& ring, std::byte* data) {
        std::memcpy(data, &frame, sizeof frame);
        ring.head = sizeof frame + 64;
      },
      tag);
}
}  // namespace

TEST(frames_of_absurd_size_or_type_for_a_waiting_receive) {
  CHECK(!receive_frame({16, 0, static_cast<std::uint32_t>(DType::int32)}));
  for (std::uint64_t nbytes : {std::uint64_t{15}, std::uint64_t{17}, kHuge, kMost}) {
    expect_failure(receive_frame({nbytes, 0, 6}), FailureKind::mismatch, "rank 1 sen");
  }
  for (std::uint32_t dtype : {12u, 99u, 255u}) {
    expect_failure(receive_frame({16, 0, dtype}), FailureKind::mismatch, "rank 1 sen");
  }
}

// Nobody waits for these: they are set aside, and must not claim memory for what never comes.
TEST(frames_of_absurd_size_for_nobody) {
  for (std::uint64_t nbytes : {std::uint64_t{1} << 33, std::uint64_t{1} << 40, kHuge, kMost}) {
    const auto failure = receive_frame({nbytes, 1234, 6}, 5);
    CHECK(failure &&
          (failure->kind == FailureKind::timeout || failure->kind == FailureKind::mismatch));
  }
}

TEST(ring_counters_that_cannot_be) {
  for (std::uint64_t head : {std::uint64_t{kRingBytes + 1}, kHuge, kMost}) {
    expect_failure(receive([&](RingControl& ring, std::byte*) { ring.head = head; }, 5),
                   FailureKind::mismatch, "rank 1");
  }
  expect_failure(receive([&](RingControl& ring, std::byte*) { ring.tail = 16; }),
                 FailureKind::mismatch, "rank 1");
}

// The receiver's side of rank 0's own ring.
TEST(a_receiver_that_has_taken_more_than_was_sent) {
  for (std::uint64_t tail : {std::uint64_t{1}, kHuge}) {
    World world(2);
    world[0].communicator->peers().own().ring(1).tail = tail;
    Ints buffer(4);
    Request request = ranks::send(DType::int32, ranks::piece(buffer), 1);
    request.timeout_s = 0.3;
    expect_failure(ranks::failure_of(*world[0].post(std::move(request))), FailureKind::mismatch,
                   "rank 1");
  }
}

TEST(half_a_frame_is_waited_for_until_the_time_is_over) {
  expect_failure(receive([](RingControl& ring, std::byte*) { ring.head = 7; }),
                 FailureKind::timeout, "rank 1 did not answer in 0.3 s");
}
