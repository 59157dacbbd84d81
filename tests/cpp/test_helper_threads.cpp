// Threads that share an operation's work: every element once, errors to the caller, the same bits.
#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "helper_threads.hpp"
#include "ranks.hpp"
#include "reference.hpp"

using namespace sdp;
using ranks::Rank;
using ranks::World;
using reference::Bytes;

namespace {
constexpr std::size_t kLarge = 3 * 1024 * 1024;  // bytes
}

TEST(every_element_is_in_one_part_and_parts_have_threads_of_their_own) {
  HelperThreads helpers(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::uint8_t> seen(kLarge / 4 + static_cast<std::size_t>(round), 0);
    std::mutex mutex;
    std::set<std::thread::id> threads;
    helpers.divide(seen.size(), 4, [&](Range part) {
      for (std::size_t i = 0; i < part.count; ++i) ++seen[part.begin + i];
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    });
    for (const std::uint8_t times : seen) CHECK_EQ(times, 1);
    CHECK_EQ(threads.size(), 3u);
    CHECK(threads.contains(std::this_thread::get_id()));
  }
}

TEST(little_work_stays_in_the_caller_s_thread) {
  HelperThreads helpers(3);
  for (std::size_t count : {0u, 1u, 100'000u}) {
    int calls = 0;
    helpers.divide(count, 1, [&](Range part) {
      CHECK_EQ(part.begin, 0u);
      CHECK_EQ(part.count, count);
      ++calls;
    });
    CHECK_EQ(calls, 1);
  }
}

TEST(an_error_of_any_thread_reaches_the_caller_when_all_are_done) {
  HelperThreads helpers(3);
  for (std::size_t failing : {0u, 1u, 2u}) {
    std::atomic<int> done = 0;
    bool thrown = false;
    try {
      helpers.divide(3 * kLarge, 1, [&](Range part) {
        if (part.begin / kLarge == failing) throw std::runtime_error("no");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++done;
      });
    } catch (const std::runtime_error&) {
      thrown = true;
      CHECK_EQ(done.load(), 2);
    }
    CHECK(thrown);
  }
}

// Both paths of an all_reduce, and a reduce_scatter, each of several threads' parts.
TEST(shared_work_has_the_bits_of_one_thread_s) {
  constexpr int kRanks = 2;
  constexpr DType kType = DType::float32;
  constexpr std::size_t kCount = kLarge / 4 + 77;
  World world(kRanks, kSlots * 2 * kLarge, -1, 3);
  std::vector<Bytes> inputs;
  for (std::uint32_t r = 0; r < kRanks; ++r) inputs.push_back(reference::sample(kType, kCount, r));
  const Bytes expected = reference::reduce(kType, ReduceOp::avg, inputs, {});
  world.each([&](int r, Rank& rank) {
    const Bytes& input = inputs[static_cast<std::size_t>(r)];
    std::byte* const registered = rank.communicator->allocate(input.size()).data;
    Bytes unregistered = input;
    std::copy(input.begin(), input.end(), registered);
    for (std::byte* const data : {registered, unregistered.data()}) {
      Request made = ranks::in_place(Op::all_reduce, kType, {data, kCount});
      made.reduce_op = ReduceOp::avg;
      rank.run(std::move(made));
      CHECK(reference::same(kType, Bytes(data, data + input.size()), expected));
    }
    Bytes whole = input;
    Bytes mine(kCount / 2 * 4);
    Request made = ranks::request(Op::reduce_scatter, kType);
    made.reduce_op = ReduceOp::avg;
    made.sends = {{whole.data(), kCount / 2}, {whole.data() + mine.size(), kCount / 2}};
    made.recvs = {{mine.data(), kCount / 2}};
    rank.run(std::move(made));
    const auto begin = expected.begin() + static_cast<std::ptrdiff_t>(mine.size()) * r;
    CHECK(reference::same(kType, mine,
                          Bytes(begin, begin + static_cast<std::ptrdiff_t>(mine.size()))));
  });
}
