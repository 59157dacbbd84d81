// A peer may have written anything: into its announcement and splits, its header, its rings, its
// messages about registered memory. Whatever it is, this rank gets a Failure in time and touches
// nothing that is not its own. (Around every mapping lies forbidden memory: shared_mappings.cpp.)
//
// Rank 0 runs as usual. Rank 1 is played by the test.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <limits>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::World;
using Ints = std::vector<std::int32_t>;

namespace {
constexpr std::uint64_t kHuge = std::uint64_t{1} << 61;
constexpr std::uint64_t kMost = ~std::uint64_t{0};
constexpr std::size_t kLarge = 20'000;  // elements of 4 bytes that do not travel inline

// What rank 1 would have announced, had it been honest, and what it showed.
struct Announced {
  Announcement announcement{};
  std::vector<std::uint64_t> splits, expected;
};

// `request`: rank 0's. Rank 1 plays the same part.
Announced honest(const Request& request) {
  Announced made;
  made.announcement.seq = 1;
  made.announcement.operation = request.signature();
  const bool in_place = request.op == Op::all_reduce;
  std::size_t nbytes = 0;
  for (const Piece& piece : in_place ? request.recvs : request.sends) {
    made.splits.push_back(piece.count);
    nbytes += piece.count * itemsize(request.dtype);
  }
  for (const Piece& piece : request.recvs) made.expected.push_back(piece.count);
  made.announcement.pieces = static_cast<std::uint16_t>(made.splits.size());
  made.announcement.inlined = nbytes <= kInlineBytes;
  // A large all_reduce has no use for pieces.
  if (in_place && made.announcement.inlined == 0) made.announcement.pieces = 0;
  return made;
}

// Rank 0 runs `request` with a rank 1 that announced this and then goes on as if all were well.
std::optional<Failure> meet(Request request, const Announced& announced) {
  World world(2);
  const Segment& theirs = world[1].communicator->peers().own();
  theirs.announcement(1) = announced.announcement;
  std::copy(announced.splits.begin(), announced.splits.end(), theirs.splits(1));
  std::copy(announced.expected.begin(), announced.expected.end(), theirs.expected(1));
  theirs.header().step.publish(1'000);
  request.timeout_s = 0.3;
  try {
    world[0].run(std::move(request));
  } catch (const Failure& failure) {
    return failure;
  }
  return std::nullopt;
}

struct Buffers {
  explicit Buffers(std::size_t count) : a(count), b(count), c(count), d(count) {}
  Ints a, b, c, d;
  std::vector<Piece> inputs() { return {ranks::piece(a), ranks::piece(b)}; }
  std::vector<Piece> outputs() { return {ranks::piece(c), ranks::piece(d)}; }
};

Request gathering(Buffers& buffers) {
  Request request = ranks::request(Op::all_gather, DType::int32);
  request.sends = {ranks::piece(buffers.a)};
  request.recvs = buffers.outputs();
  return request;
}
Request exchanging(Buffers& buffers) {
  Request request = ranks::request(Op::all_to_all, DType::int32);
  request.sends = buffers.inputs();
  request.recvs = buffers.outputs();
  return request;
}
Request reducing_pieces(Buffers& buffers) {
  Request request = ranks::request(Op::reduce_scatter, DType::int32);
  request.sends = buffers.inputs();
  request.recvs = {ranks::piece(buffers.c)};
  return request;
}
Request reducing(Buffers& buffers) {
  return ranks::in_place(Op::all_reduce, DType::int32, ranks::piece(buffers.a));
}

void expect(const std::optional<Failure>& failure, FailureKind kind, const std::string& part) {
  CHECK(failure.has_value());
  if (std::string(failure->what()).find(part) == std::string::npos) {
    check::fail(__FILE__, __LINE__, failure->what());
  }
  CHECK_EQ(name(failure->kind), name(kind));
}

using Make = Request (*)(Buffers&);

// `change` turns what an honest rank announces into something else, for small and large payloads.
template <class Change>
void expect_mismatch(Make make, Change&& change, const std::string& part = "") {
  for (std::size_t count : {std::size_t{5}, kLarge}) {
    Buffers buffers(count);
    const Request request = make(buffers);
    Announced announced = honest(request);
    change(announced);
    expect(meet(request, announced), FailureKind::mismatch, part);
  }
}
}  // namespace

TEST(an_honest_announcement_passes) {
  for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
    for (std::size_t count : {std::size_t{5}, kLarge}) {
      Buffers buffers(count);
      const auto failure = meet(make(buffers), honest(make(buffers)));
      CHECK_EQ(failure ? failure->what() : std::string(), "");
    }
  }
}

TEST(wrong_numbers_of_pieces) {
  for (Make make : {gathering, exchanging, reducing_pieces}) {
    for (int pieces : {0, 3, 200, 65535}) {
      expect_mismatch(make, [&](Announced& one) {
        one.announcement.pieces = static_cast<std::uint16_t>(pieces);
      });
    }
  }
  expect_mismatch(exchanging, [](Announced& one) { one.announcement.pieces = 1; });
  expect_mismatch(reducing_pieces, [](Announced& one) { one.announcement.pieces = 1; });
}

TEST(absurd_lengths) {
  for (Make make : {gathering, exchanging, reducing_pieces}) {
    for (std::uint64_t length : {kHuge, kMost, kMost / 4, std::uint64_t{1} << 40}) {
      for (std::size_t which : {0, 1}) {
        expect_mismatch(make, [&](Announced& one) {
          one.splits[which % one.splits.size()] = length;
          one.announcement.operation.count = length;
        });
      }
    }
  }
}

TEST(a_broadcast_of_another_length_than_announced) {
  for (std::uint64_t length : {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{8192}}) {
    Buffers buffers(5);
    Request request = ranks::in_place(Op::broadcast, DType::int32, ranks::piece(buffers.a));
    request.root = 1;
    Announced announced = honest(request);
    announced.splits = {length};
    announced.announcement.pieces = 1;
    announced.announcement.inlined = 1;
    expect(meet(request, announced), FailureKind::mismatch, "impossible pieces");
  }
}

// The first length sends the reader of the second piece far away; the sum wraps to what is
// expected.
TEST(lengths_whose_sum_wraps_around) {
  expect_mismatch(exchanging, [](Announced& one) { one.splits = {one.splits[0], kMost}; });
  expect_mismatch(exchanging, [](Announced& one) {
    one.splits = {one.splits[0] + kHuge * 2, one.splits[1]};
    one.expected[1] = one.splits[0];
  });
}

// Whatever rank 1 takes and offers to itself is its own affair, but it must not lead us astray.
TEST(a_wrong_length_for_itself) {
  for (std::uint64_t length : {kHuge, kMost, std::uint64_t{100'000}}) {
    Buffers buffers(5);
    Announced announced = honest(exchanging(buffers));
    announced.splits[1] = announced.expected[1] = length;
    announced.announcement.operation.count = length;
    expect(meet(exchanging(buffers), announced), FailureKind::mismatch, "");
  }
}

// Rank 0 is the impostor: its first piece sends the reader of the second one out of the segment.
TEST(a_wrong_length_before_the_piece_that_is_read) {
  for (std::uint64_t length : {kHuge, kMost, kMost - 5, std::uint64_t{8192}}) {
    World world(2);
    Buffers buffers(5);
    Request request = exchanging(buffers);
    Announced announced = honest(request);
    announced.splits[0] = announced.expected[0] = announced.announcement.operation.count = length;
    const Segment& theirs = world[0].communicator->peers().own();
    theirs.announcement(1) = announced.announcement;
    std::copy(announced.splits.begin(), announced.splits.end(), theirs.splits(1));
    std::copy(announced.expected.begin(), announced.expected.end(), theirs.expected(1));
    theirs.header().step.publish(1'000);
    CHECK_THROWS(world[1].run(request), Failure, "rank 0 announced impossible pieces");
  }
}

TEST(lengths_of_reductions_that_are_not_the_announced_count) {
  expect_mismatch(reducing_pieces, [](Announced& one) { one.splits[0] = 1; });
  expect_mismatch(reducing_pieces, [](Announced& one) { one.splits[1] += 1; });
}

TEST(flags_that_are_neither_true_nor_false) {
  for (int flag : {2, 255}) {
    for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
      for (std::size_t count : {std::size_t{5}, kLarge}) {
        Buffers buffers(count);
        Announced announced = honest(make(buffers));
        std::memset(&announced.announcement.inlined, flag, 1);
        std::memset(&announced.announcement.registered, flag, 1);
        meet(make(buffers), announced);  // may fail or time out, must come back
      }
    }
  }
}

// "Inline", but as large as it gets; or not inline though it is small.
TEST(a_payload_that_is_not_where_it_should_be) {
  for (Make make : {gathering, exchanging, reducing, reducing_pieces}) {
    for (std::size_t count : {std::size_t{5}, kLarge}) {
      for (int flag : {0, 1}) {
        Buffers buffers(count);
        Announced announced = honest(make(buffers));
        announced.announcement.inlined = flag;
        meet(make(buffers), announced);  // wrong data, perhaps, but in bounds
      }
    }
  }
}

TEST(garbage_instead_of_a_record) {
  for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
    expect_mismatch(
        reducing,
        [&](Announced& one) {
          std::memset(static_cast<void*>(&one.announcement), byte, sizeof one.announcement);
        },
        "ranks disagree: rank 0: all_reduce #1 int32[");
  }
}

TEST(types_and_operations_that_do_not_exist) {
  expect_mismatch(reducing,
                  [](Announced& one) { one.announcement.operation.op = static_cast<Op>(250); });
  expect_mismatch(
      reducing, [](Announced& one) { one.announcement.operation.dtype = static_cast<DType>(99); });
  expect_mismatch(reducing, [](Announced& one) {
    one.announcement.operation.reduce_op = static_cast<ReduceOp>(77);
  });
}

// ---- registered memory

namespace {
struct Message {
  std::uint64_t region, nbytes, file_offset;
};

void send_message(int socket, const void* data, std::size_t nbytes, int file) {
  CHECK_EQ(ranks::send_message(socket, data, nbytes, file), static_cast<ssize_t>(nbytes));
}

// Rank 0 reduces registered memory; rank 1 says `message`, attaches `file`, and claims that its
// buffer lies at `place`.
std::optional<Failure> meet_region(const void* message, std::size_t nbytes, int file,
                                   RegionPlace place) {
  World world(2);
  const auto memory = world[0].communicator->allocate(kLarge * 4);
  send_message(world[1].communicator->peers().socket(0), message, nbytes, file);
  const Segment& theirs = world[1].communicator->peers().own();
  Request request = ranks::in_place(Op::all_reduce, DType::int32, {memory.data, kLarge});
  Announcement& announcement = theirs.announcement(1);
  announcement = honest(request).announcement;
  announcement.inlined = false;
  announcement.pieces = 0;
  announcement.registered = true;
  announcement.region = place.region;
  announcement.offset = place.offset;
  announcement.region_version = 1;
  theirs.header().step.publish(1'000);
  request.timeout_s = 0.3;
  try {
    world[0].run(std::move(request));
  } catch (const Failure& failure) {
    return failure;
  }
  return std::nullopt;
}

}  // namespace

TEST(an_honest_region_passes) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const Message message{7, kLarge * 4, 0};
  const auto failure = meet_region(&message, sizeof message, file.get(), {7, 0});
  CHECK_EQ(failure ? failure->what() : std::string(), "");
}

TEST(messages_of_another_size) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  std::vector<std::byte> bytes(200, std::byte{1});
  for (std::size_t nbytes : {1, 8, 23, 25, 200}) {
    for (int attached : {-1, file.get()}) {
      const int before = ranks::open_files();
      expect(meet_region(bytes.data(), nbytes, attached, {7, 0}), FailureKind::mismatch,
             "rank 1 sent a malformed message about registered memory");
      CHECK_EQ(ranks::open_files(), before);
    }
  }
}

TEST(regions_without_a_file_or_beyond_its_end) {
  const FileDescriptor file = ranks::file_of(kLarge * 4);
  const auto claim = [&](Message message, int attached) {
    return meet_region(&message, sizeof message, attached, {7, 0});
  };
  expect(claim({7, kLarge * 4, 0}, -1), FailureKind::mismatch, "without a file");
  for (Message message : {Message{7, kLarge * 4 + 1, 0}, Message{7, kMost, 0}, Message{7, kMost, 1},
                          Message{7, kLarge * 4, 4096}, Message{7, kLarge * 4, 0 - 4096ull}}) {
    expect(claim(message, file.get()), FailureKind::shared_memory, "a shared memory file holds");
  }
  expect(claim({7, 4096, 1}, file.get()), FailureKind::shared_memory, "cannot map");
  const FileDescriptor directory(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  expect(claim({7, kLarge * 4, 0}, directory.get()), FailureKind::shared_memory, "");
}

TEST(places_outside_of_the_region) {
  const FileDescriptor file = ranks::file_of(kLarge * 4 + 4096);
  const Message message{7, kLarge * 4 + 4096, 0};
  const auto claim = [&](RegionPlace place) {
    return meet_region(&message, sizeof message, file.get(), place);
  };
  CHECK(!claim({7, 4096}));
  const char* outside = "rank 1 sent a range outside its region";
  for (std::uint64_t offset : {std::uint64_t{4097}, kHuge, kMost, 0 - std::uint64_t{4096}}) {
    expect(claim({7, offset}), FailureKind::mismatch, outside);
  }
  for (std::uint64_t region : {std::uint64_t{0}, std::uint64_t{8}, kMost}) {
    expect(claim({region, 0}), FailureKind::mismatch,
           "rank 1 announced memory that it has not registered");
  }
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

// ---- the cause of a failure

TEST(a_cause_without_an_end) {
  World world(2);
  Header& header = world[1].header();
  std::memset(static_cast<void*>(&header.failure), 'x', sizeof header.failure);
  header.failure.kind = static_cast<FailureKind>(0xdeadbeef);
  for (auto& rank : header.failure.ranks) rank = 0x7fffffff;
  header.state = PeerState::failed;
  Request request = ranks::request(Op::barrier, DType::uint8);
  try {
    world[0].run(request);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.kind == FailureKind::peer_lost);
    CHECK(failure.ranks == std::vector<int>{1});
    CHECK(std::strlen(failure.what()) < 1000);
  }
}

TEST(a_state_that_does_not_exist) {
  World world(2);
  world[1].header().state = static_cast<PeerState>(77);
  CHECK_THROWS(world[0].run(ranks::request(Op::barrier, DType::uint8)), Failure, "rank 1");
}

// ---- rings

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
    expect(receive_frame({nbytes, 0, 6}), FailureKind::mismatch, "rank 1 sen");
  }
  for (std::uint32_t dtype : {12u, 99u, 255u}) {
    expect(receive_frame({16, 0, dtype}), FailureKind::mismatch, "rank 1 sen");
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
    expect(receive([&](RingControl& ring, std::byte*) { ring.head = head; }, 5),
           FailureKind::mismatch, "rank 1");
  }
  expect(receive([&](RingControl& ring, std::byte*) { ring.tail = 16; }), FailureKind::mismatch,
         "rank 1");
}

// The receiver's side of rank 0's own ring.
TEST(a_receiver_that_has_taken_more_than_was_sent) {
  for (std::uint64_t tail : {std::uint64_t{1}, kHuge}) {
    World world(2);
    world[0].communicator->peers().own().ring(1).tail = tail;
    Ints buffer(4);
    Request request = ranks::send(DType::int32, ranks::piece(buffer), 1);
    request.timeout_s = 0.3;
    expect(ranks::failure_of(*world[0].post(std::move(request))), FailureKind::mismatch, "rank 1");
  }
}

TEST(half_a_frame_is_waited_for_until_the_time_is_over) {
  expect(receive([](RingControl& ring, std::byte*) { ring.head = 7; }), FailureKind::timeout,
         "rank 1 did not answer in 0.3 s");
}
