// Which bytes move when, exhaustively over small sizes.
#include "check.hpp"
#include "path_choice.hpp"
#include "segment.hpp"
#include "shards.hpp"

using namespace sdp;

namespace {
template <class Body>
void for_all_shards(Body&& body) {
  for (std::size_t align : {1, 2, 8, 32}) {
    for (int parts = 1; parts <= 9; ++parts) {
      for (std::size_t total = 0; total <= 300; ++total) body(total, parts, align);
    }
  }
}
}  // namespace

TEST(shards_cover_every_element_exactly_once_in_rank_order) {
  for_all_shards([](std::size_t total, int parts, std::size_t align) {
    const Shards shards(total, parts, align);
    std::size_t at = 0;
    for (int i = 0; i < parts; ++i) {
      CHECK_EQ(shards.shard(i).begin, at);
      at += shards.shard(i).count;
    }
    CHECK_EQ(at, total);
  });
}

TEST(shards_start_aligned_and_are_balanced) {
  for_all_shards([](std::size_t total, int parts, std::size_t align) {
    const Shards shards(total, parts, align);
    const std::size_t fair = (total + static_cast<std::size_t>(parts) - 1) / parts;
    for (int i = 0; i < parts; ++i) {
      const Range shard = shards.shard(i);
      if (shard.count > 0) CHECK_EQ(shard.begin % align, 0);
      CHECK(shard.count < fair + align);  // nobody serves more than its fair share, rounded up
      const bool ends_the_data = shard.begin + shard.count == total;
      CHECK(shard.count == shards.shard(0).count || ends_the_data);
    }
  });
}

TEST(chunks_cover_each_shard_in_the_fewest_rounds) {
  for_all_shards([](std::size_t total, int parts, std::size_t align) {
    const Shards shards(total, parts, align);
    for (std::size_t chunk : {1, 3, 8, 64}) {
      const std::size_t rounds = shards.rounds(chunk);
      for (int i = 0; i < parts; ++i) {
        const Range shard = shards.shard(i);
        std::size_t at = shard.begin;
        for (std::size_t round = 0; round < rounds; ++round) {
          const Range part = shards.chunk(i, round, chunk);
          CHECK_EQ(part.begin, at);
          CHECK(part.count <= chunk);
          at += part.count;
        }
        CHECK_EQ(at, shard.begin + shard.count);
        CHECK_EQ(shards.chunk(i, rounds + 5, chunk).count, 0);
      }
      // One round fewer could not carry a whole shard of the planned length.
      const std::size_t length = Shards::round_up(Shards::ceil_div(total, parts), align);
      CHECK(rounds * chunk >= length);
      CHECK(rounds == 0 || (rounds - 1) * chunk < length);
    }
  });
}

TEST(the_path_follows_from_operation_size_and_registration) {
  for (int i = 0; i < kOps * 4; ++i) {
    const auto op = static_cast<Op>(i / 4);
    const bool is_step = i % 2 != 0, registered = i / 2 % 2 != 0;
    for (std::size_t small : {std::size_t{0}, std::size_t{1}, kInlineBytes}) {
      CHECK(travels_inline(small));
      CHECK(choose_path(op, is_step, small, registered) == Path::inlined);
    }
    for (std::size_t large : {kInlineBytes + 1, std::size_t{1} << 40}) {
      const bool in_place = registered && (is_step || op == Op::all_reduce);
      CHECK(!travels_inline(large));
      CHECK(choose_path(op, is_step, large, registered) ==
            (in_place ? Path::zero_copy : Path::staged));
    }
  }
}

TEST(every_path_has_a_name_and_a_reason) {
  for (Path path : {Path::none, Path::inlined, Path::staged, Path::zero_copy}) {
    CHECK(std::strlen(name(path)) > 0);
    CHECK(std::strlen(reason(path)) > 0);
  }
}

TEST(types_have_names_and_sizes_and_tolerate_garbage) {
  for (int i = 0; i < kDTypes; ++i) {
    CHECK(!name(static_cast<DType>(i)).empty());
    CHECK(itemsize(static_cast<DType>(i)) > 0 && kAlign % itemsize(static_cast<DType>(i)) == 0);
  }
  for (int i = 0; i < kReduceOps; ++i) CHECK(!name(static_cast<ReduceOp>(i)).empty());
  for (int i = 0; i < kOps; ++i) CHECK(!name(static_cast<Op>(i)).empty());
  for (int i = 20; i < 256; ++i) {
    CHECK(name(static_cast<DType>(i)).empty() && itemsize(static_cast<DType>(i)) == 0);
    CHECK(name(static_cast<ReduceOp>(i)).empty());
    CHECK(name(static_cast<Op>(i)).empty());
    CHECK(!reduces(static_cast<Op>(i)) && !is_rooted(static_cast<Op>(i)));
  }
}
