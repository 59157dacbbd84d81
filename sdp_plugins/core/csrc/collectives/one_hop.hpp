// The pattern of every collective with a single hop: each rank shows pieces, and the others take
// those that they need. Small payloads are part of the announcement (one synchronization). Larger
// ones go through the staging slots in rounds; showing in one round overlaps taking in the previous
// round. The steps of a larger group's operations take pieces directly from registered memory if
// each rank's lie in one run of registered memory.
#pragma once

#include <span>
#include <vector>

#include "../operation.hpp"
#include "../shards.hpp"

namespace sdp {

class OneHop {
 public:
  // Announces the operation, showing `pieces` (borrowed until `run` returns).
  OneHop(Operation& op, std::span<const Piece> pieces);

  // The number of pieces that `rank` shows and their lengths in elements.
  std::size_t n_pieces(int rank) const { return offers_[static_cast<std::size_t>(rank)].size(); }
  std::uint64_t count(int rank, std::size_t piece) const {
    return offers_[static_cast<std::size_t>(rank)][piece];
  }

  // Runs the rounds: `take(round)` is called once per round. Use `part(rank, piece, round)` in it.
  template <class Take>
  void run(Take&& take) {
    if (path_ == Path::inlined) return take(std::size_t{0});
    if (path_ == Path::zero_copy) {
      op_.access_peer_memory([&] { take(std::size_t{0}); });
      op_.publish();
      op_.await_all();  // only then may a caller reuse the memory that it has shown
      return;
    }
    op_.lockstep(rounds_, [&](std::size_t round) { show(round); }, take);
  }

  // The elements of a peer's piece that are visible in this round.
  struct Part {
    const std::byte* data;
    Range range;  // within the piece
  };
  Part part(int rank, std::size_t piece, std::size_t round) const;

 private:
  bool sound(int rank) const;              // whether its announcement is valid
  std::uint64_t shown_by(int rank) const;  // elements
  void find_places();                      // of all ranks' pieces
  void show(std::size_t round);
  void show_inline();
  std::size_t chunk(std::size_t pieces) const;  // elements per piece and round

  Operation& op_;
  std::span<const Piece> pieces_;
  // The lengths of all ranks' pieces, read once: a peer could change its own at any time.
  std::vector<std::vector<std::uint64_t>> offers_;
  std::vector<const std::byte*> places_;  // zero-copy: all ranks' first pieces
  Path path_ = Path::staged;
  std::size_t rounds_ = 0;
};

// Takes a whole piece: `into` from the `piece`-th piece of `rank`. This rank's own piece is copied
// directly.
struct Take {
  int rank;
  std::size_t piece;
  Piece into;
};
void copy_exchange(Operation& op, std::span<const Piece> shown, std::span<const Take> takes);
}  // namespace sdp
