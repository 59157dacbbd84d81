// A buffer whose elements lie in a sequence of separate pieces of memory, such as the tensors of a
// fusion buffer.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "../request.hpp"
#include "../shards.hpp"

namespace sdp {

class PieceList {
 public:
  PieceList(std::span<const Piece> pieces, std::size_t itemsize)
      : pieces_(pieces), itemsize_(itemsize) {
    ends_.reserve(pieces.size());
    for (const Piece& piece : pieces) ends_.push_back(count() + piece.count);
  }
  std::size_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Visits the contiguous runs of a range in order: `visit(data, n, done)`, where `done` is the
  // number of elements of the range before the run.
  template <class Visit>
  void each(Range range, Visit&& visit) const {
    for (std::size_t done = 0; done < range.count;) {
      const Piece run = from(range.begin + done);
      const std::size_t n = std::min(run.count, range.count - done);
      visit(run.data, n, done);
      done += n;
    }
  }

  // The rest of the piece that has an element, from this one on.
  Piece from(std::size_t element) const {
    const auto piece = static_cast<std::size_t>(
        std::upper_bound(ends_.begin(), ends_.end(), element) - ends_.begin());
    const std::size_t left = ends_[piece] - element;
    return {pieces_[piece].data + (pieces_[piece].count - left) * itemsize_, left};
  }

 private:
  std::span<const Piece> pieces_;
  std::size_t itemsize_;
  std::vector<std::size_t> ends_;  // end of each piece, in elements from the start
};
}  // namespace sdp
