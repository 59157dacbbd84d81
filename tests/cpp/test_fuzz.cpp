// A peer that writes anything anywhere, drawn at random from a seed: into its records, splits,
// header, payloads, slots and rings, and into its messages about registered memory, before an
// operation and during it. Whatever it is, this rank succeeds or gets a Failure in time, and
// touches nothing that is not its own (which the sanitizers and shared_mappings.cpp watch).
//
// Rank 0 runs as usual. Rank 1 is played by the test. Nothing here knows where things lie in a
// segment. FUZZ_SECONDS is how long each case goes on, FUZZ_SEED where it begins; with FUZZ_VERBOSE
// each seed is printed, the last one before a crash too.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "check.hpp"
#include "ranks.hpp"

using namespace sdp;
using ranks::World;
using Ints = std::vector<std::int32_t>;
using Draw = std::mt19937_64;

#if defined(__SANITIZE_THREAD__)
constexpr bool kRaces = false;  // a peer that writes while we read is a race, by definition
#else
constexpr bool kRaces = true;
#endif

namespace {
constexpr double kPatienceS = 0.02;
// In which an operation of 20 ms has to end, on a busy machine: the peer may pretend to access our
// memory.
constexpr double kLimitS = 5 + kAccessS;

double setting(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atof(text);
}

std::uint64_t below(Draw& draw, std::uint64_t limit) {
  return draw() % limit;
}

// Values at which arithmetic goes wrong, or any.
std::uint64_t word(Draw& draw) {
  constexpr std::array<std::uint64_t, 14> kExtremes = {0,
                                                       1,
                                                       2,
                                                       127,
                                                       128,
                                                       0x7fff'ffff,
                                                       0x8000'0000,
                                                       0xffff'ffff,
                                                       0xffff'ffff'ffff'ffff,
                                                       std::uint64_t{1} << 61,
                                                       std::uint64_t{1} << 62,
                                                       std::uint64_t{1} << 63,
                                                       32 * 1024,
                                                       256 * 1024};
  const std::uint64_t kind = below(draw, 4);
  if (kind == 0) return draw();
  if (kind == 1) return below(draw, 100'000);
  return kExtremes[below(draw, kExtremes.size())] - (kind == 2 ? 0 : below(draw, 3));
}

struct Range {
  std::byte* data;
  std::size_t nbytes;
};

template <class T>
Range range(T& object) {
  return {reinterpret_cast<std::byte*>(&object), sizeof object};
}

// What rank 1 may write to, what is read first most often.
std::vector<Range> reachable(World& world) {
  const Peers& peers = world[1].communicator->peers();
  const Segment& theirs = peers.own();
  std::vector<Range> all;
  for (std::uint64_t parity : {0, 1}) {
    for (int times = 0; times < 4; ++times) all.push_back(range(theirs.announcement(parity)));
    all.push_back({reinterpret_cast<std::byte*>(theirs.splits(parity)), 2 * sizeof(std::uint64_t)});
    all.push_back(
        {reinterpret_cast<std::byte*>(theirs.expected(parity)), 2 * sizeof(std::uint64_t)});
    all.push_back({reinterpret_cast<std::byte*>(theirs.runs(parity)), 2 * sizeof(Run)});
    all.push_back({theirs.inline_payload(parity), kInlineBytes});
  }
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    all.push_back({theirs.slot(slot), peers.layout().slot_bytes()});
  }
  all.push_back(range(theirs.header()));
  all.push_back(range(theirs.header().step));
  for (int times = 0; times < 4; ++times) {
    all.push_back(range(theirs.ring(0)));
    all.push_back({theirs.ring_data(0), 64});
  }
  all.push_back({theirs.ring_data(0), kRingBytes});
  all.push_back(range(world[0].communicator->peers().own().ring(1).tail));  // ours, of its reads
  return all;
}

// A bit, or a word of 1, 2, 4 or 8 bytes where such may lie.
void scribble(const std::vector<Range>& ranges, Draw& draw) {
  const Range& range = ranges[below(draw, ranges.size())];
  const std::size_t width = std::size_t{1} << below(draw, 4);
  const std::size_t at = below(draw, range.nbytes / width) * width;
  if (below(draw, 3) == 0) {
    std::byte flipped = range.data[at] ^ static_cast<std::byte>(1 << below(draw, 8));
    std::memcpy(range.data + at, &flipped, 1);
    return;
  }
  const std::uint64_t value = word(draw);
  std::memcpy(range.data + at, &value, width);
}

// Rank 1 goes on writing as long as this lives.
class Scribbler {
 public:
  Scribbler(World& world, std::uint64_t seed)
      : thread_([this, ranges = reachable(world), seed] {
          Draw draw(seed);
          while (!done_) {
            scribble(ranges, draw);
            if (below(draw, 50) == 0) std::this_thread::yield();
          }
        }) {}
  ~Scribbler() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// `once(draw)` with one seed after the other, until the time is over.
template <class Once>
void fuzz(std::uint64_t salt, Once&& once) {
  const double end = now_s() + setting("FUZZ_SECONDS", 1);
  const bool verbose = setting("FUZZ_VERBOSE", 0) != 0;
  auto seed = static_cast<std::uint64_t>(setting("FUZZ_SEED", 1));
  do {
    if (verbose) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    Draw draw(seed * 1000 + salt);
    const double began = now_s();
    once(draw);
    CHECK(now_s() - began < kLimitS);
    ++seed;
  } while (now_s() < end);
}

// Anything but a Failure, an std::bad_alloc for example, ends the case.
template <class Call>
void may_fail(Call&& call) {
  try {
    call();
  } catch (const Failure& failure) {
    CHECK(std::strlen(failure.what()) < 4000);
  }
}

struct Buffers {
  explicit Buffers(std::size_t count) : a(count), b(count), c(count), d(count) {}
  Ints a, b, c, d;
};

// A collective of rank 0's.
Request any_collective(Buffers& buffers, Draw& draw) {
  constexpr std::array<Op, 9> kOps = {Op::all_reduce, Op::reduce,         Op::broadcast,
                                      Op::all_gather, Op::reduce_scatter, Op::gather,
                                      Op::scatter,    Op::all_to_all,     Op::barrier};
  const Op op = kOps[below(draw, kOps.size())];
  const int root = is_rooted(op) ? static_cast<int>(below(draw, 2)) : -1;
  const Piece a = ranks::piece(buffers.a), b = ranks::piece(buffers.b);
  const Piece c = ranks::piece(buffers.c), d = ranks::piece(buffers.d);
  Request request = ranks::request(op, op == Op::barrier ? DType::uint8 : DType::int32);
  request.root = root;
  if (op == Op::all_reduce || op == Op::reduce || op == Op::broadcast) request.recvs = {a};
  if (op == Op::all_gather || (op == Op::gather && root == 0)) request.recvs = {c, d};
  if (op == Op::all_gather || op == Op::gather) request.sends = {a};
  if (op == Op::reduce_scatter || op == Op::scatter) request.recvs = {c};
  if (op == Op::reduce_scatter || (op == Op::scatter && root == 0)) request.sends = {a, b};
  if (op == Op::all_to_all) request.sends = {a, b}, request.recvs = {c, d};
  request.timeout_s = kPatienceS;
  return request;
}

// What rank 1 announces: the same, most of it.
void announce(World& world, const Request& request, Draw& draw) {
  const Segment& theirs = world[1].communicator->peers().own();
  const bool in_place = request.sends.empty();
  Announcement record{};
  record.seq = 1;
  record.operation = request.signature();
  std::size_t nbytes = 0, piece = 0;
  for (const Piece& part : in_place ? request.recvs : request.sends) {
    theirs.splits(1)[piece++] = part.count;
    nbytes += part.count * itemsize(request.dtype);
  }
  record.pieces = static_cast<std::uint16_t>(piece);
  piece = 0;
  for (const Piece& part : request.recvs) theirs.expected(1)[piece++] = part.count;
  record.inlined = nbytes <= kInlineBytes;
  record.runs = below(draw, 8) == 0;
  theirs.announcement(1) = record;
}

std::size_t any_count(Draw& draw) {
  constexpr std::array<std::size_t, 7> kCounts = {0, 1, 5, 4096, 8192, 8193, 20'000};
  return kCounts[below(draw, kCounts.size())];
}
}  // namespace

TEST(collectives_with_a_peer_that_writes_anything) {
  fuzz(1, [](Draw& draw) {
    World world(2);
    Buffers buffers(any_count(draw));
    const Request request = any_collective(buffers, draw);
    announce(world, request, draw);
    const auto ranges = reachable(world);
    for (std::uint64_t n = below(draw, 6); n > 0; --n) scribble(ranges, draw);
    world[1].header().step.publish(static_cast<std::uint32_t>(1 + below(draw, 1000)));
    may_fail([&] { world[0].run(request); });
  });
}

TEST(collectives_with_a_peer_that_goes_on_writing) {
  if (!kRaces) return;
  fuzz(2, [](Draw& draw) {
    World world(2);
    Buffers buffers(any_count(draw));
    const Request request = any_collective(buffers, draw);
    announce(world, request, draw);
    world[1].header().step.publish(1000);
    const Scribbler scribbler(world, draw());
    may_fail([&] { world[0].run(request); });
  });
}

namespace {
// A receive of rank 0's, to which rank 1 sends in good order, and a send, with what `spoil` adds.
template <class Spoil>
void exchange(World& world, Draw& draw, Spoil&& spoil) {
  Ints sent(any_count(draw)), received(sent.size()), back(any_count(draw));
  Request in = ranks::recv(DType::int32, ranks::piece(received), below(draw, 2) ? 1 : -1,
                           static_cast<std::uint32_t>(below(draw, 2)));
  Request out = ranks::send(DType::int32, ranks::piece(back), 1);
  in.timeout_s = out.timeout_s = kPatienceS;
  Request theirs = ranks::send(DType::int32, ranks::piece(sent), 0);
  theirs.timeout_s = kPatienceS;
  std::shared_ptr<Work> honest = world[1].post(std::move(theirs));
  const auto spoiling = spoil();
  std::vector<std::shared_ptr<Work>> works;
  may_fail([&] { works.push_back(world[0].post(std::move(in))); });
  may_fail([&] { works.push_back(world[0].post(std::move(out))); });
  for (const auto& work : works) ranks::failure_of(*work);
  world[0].close();
  world[1].close();
  ranks::failure_of(*honest);
}
}  // namespace

TEST(messages_of_a_peer_that_goes_on_writing) {
  if (!kRaces) return;
  fuzz(3, [](Draw& draw) {
    World world(2);
    exchange(world, draw, [&] { return std::make_unique<Scribbler>(world, draw()); });
  });
}

TEST(rings_that_hold_anything) {
  fuzz(4, [](Draw& draw) {
    World world(2);
    const Segment& theirs = world[1].communicator->peers().own();
    const std::uint64_t head = word(draw);
    std::array<std::uint64_t, 8> words{};
    for (auto& one : words) one = word(draw);
    std::memcpy(theirs.ring_data(0), words.data(), sizeof words);
    theirs.ring(0).head = below(draw, 2) ? head : below(draw, sizeof words);
    if (below(draw, 4) == 0) world[0].communicator->peers().own().ring(1).tail = word(draw);
    Ints buffer(any_count(draw));
    Request in = ranks::recv(DType::int32, ranks::piece(buffer), below(draw, 2) ? 1 : -1,
                             static_cast<std::uint32_t>(below(draw, 2)));
    Request out = ranks::send(DType::int32, ranks::piece(buffer), 1);
    in.timeout_s = out.timeout_s = kPatienceS;
    std::vector<std::shared_ptr<Work>> works;
    may_fail([&] { works.push_back(world[0].post(std::move(in))); });
    may_fail([&] { works.push_back(world[0].post(std::move(out))); });
    for (const auto& work : works) ranks::failure_of(*work);
  });
}

namespace {
// A message of rank 1's about registered memory, or of as many random bytes; perhaps with a file.
void send_letter(World& world, Draw& draw) {
  std::array<std::uint64_t, 4> words = {below(draw, 3), word(draw), below(draw, 4) * 4096, 0};
  if (below(draw, 4) == 0) words[below(draw, 3)] = word(draw);
  const std::size_t nbytes = below(draw, 6) ? 24 : below(draw, 33);
  const int fd = memfd_create("fuzz", MFD_CLOEXEC);
  if (ftruncate(fd, static_cast<off_t>(below(draw, 5) * 50'000)) != 0) return;
  const int to = world[1].communicator->peers().socket(0);
  const int attached = below(draw, 4) != 0 ? fd : -1;
  ranks::send_message(to, words.data(), nbytes, attached, MSG_NOSIGNAL | MSG_DONTWAIT);
  close(fd);
}
}  // namespace

TEST(messages_about_registered_memory) {
  fuzz(5, [](Draw& draw) {
    World world(2);
    const std::size_t count = 20'000;
    const auto memory = world[0].communicator->allocate(count * 4);
    Request request = ranks::in_place(Op::all_reduce, DType::int32, {memory.data, count});
    request.timeout_s = kPatienceS;
    announce(world, request, draw);
    for (std::uint64_t n = below(draw, 5); n > 0; --n) send_letter(world, draw);
    Announcement& record = world[1].communicator->peers().own().announcement(1);
    record.runs = static_cast<std::uint16_t>(below(draw, 4) ? 1 + below(draw, 3) : word(draw));
    record.pieces = 0;
    for (std::size_t i = 0, left = count; i < std::min<std::size_t>(record.runs, 3); ++i) {
      const std::uint64_t n = i + 1 == record.runs ? left : below(draw, left + 1);
      left -= n;
      world[1].communicator->peers().own().runs(1)[i] = {
          below(draw, 4) ? below(draw, 3) : word(draw), below(draw, 2) ? 0 : word(draw),
          below(draw, 4) ? n : word(draw)};
    }
    record.region_version = word(draw);
    world[1].header().step.publish(1000);
    may_fail([&] { world[0].run(request); });
  });
}
