#include "aliased_inputs.hpp"

#include <algorithm>
#include <functional>

namespace sdp {
namespace {
struct Extent {
  const std::byte* begin;
  const std::byte* end;
  std::size_t index;  // in its list
  bool is_own;        // the piece that this rank keeps
};

std::vector<Extent> extents_of(const std::vector<Piece>& pieces, int rank, std::size_t item_bytes) {
  std::vector<Extent> extents;
  extents.reserve(pieces.size());
  const std::size_t own = pieces.size() == 1 ? 0 : static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.count == 0) continue;
    extents.push_back({piece.data, piece.data + piece.count * item_bytes, i, i == own});
  }
  return extents;
}

bool overlap(const Extent& a, const Extent& b) {
  // Only the library's function objects order pointers to unrelated objects.
  return std::less<>()(a.begin, b.end) && std::less<>()(b.begin, a.end);
}

bool same_place(const Extent& a, const Extent& b) {
  return a.is_own && b.is_own && a.begin == b.begin && a.end == b.end;
}

// The smallest extent that contains all extents.
Extent hull(const std::vector<Extent>& extents) {
  Extent all = extents.front();
  for (const Extent& extent : extents) {
    all.begin = std::min(all.begin, extent.begin, std::less<>());
    all.end = std::max(all.end, extent.end, std::less<>());
  }
  return all;
}
}  // namespace

std::vector<std::size_t> aliased_inputs(const Request& request, int rank) {
  const std::size_t item_bytes = itemsize(request.dtype);
  const auto inputs = extents_of(request.sends, rank, item_bytes);
  auto outputs = extents_of(request.recvs, rank, item_bytes);
  if (inputs.empty() || outputs.empty() || !overlap(hull(inputs), hull(outputs))) return {};
  std::ranges::sort(outputs, std::less<>(), &Extent::begin);
  std::vector<std::size_t> found;
  for (const Extent& input : inputs) {
    // Outputs do not overlap each other, so only the first that ends behind the input's begin and
    // those after it can overlap the input.
    auto output = std::ranges::partition_point(
        outputs, [&](const Extent& extent) { return !std::less<>()(input.begin, extent.end); });
    for (; output != outputs.end() && overlap(input, *output); ++output) {
      if (same_place(input, *output)) continue;
      found.push_back(input.index);
      break;
    }
  }
  return found;
}
}  // namespace sdp
