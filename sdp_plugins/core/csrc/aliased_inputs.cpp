#include "aliased_inputs.hpp"

#include <algorithm>
#include <functional>

namespace sdp {
namespace {
struct Span {
  const std::byte* begin;
  const std::byte* end;
  std::size_t index;  // in its list
  bool is_own;        // the piece that this rank keeps
};

std::vector<Span> spans_of(const std::vector<Piece>& pieces, int rank, std::size_t item_bytes) {
  std::vector<Span> spans;
  spans.reserve(pieces.size());
  const std::size_t own = pieces.size() == 1 ? 0 : static_cast<std::size_t>(rank);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.count == 0) continue;
    spans.push_back({piece.data, piece.data + piece.count * item_bytes, i, i == own});
  }
  return spans;
}

bool overlap(const Span& a, const Span& b) {
  // Only the library's function objects order pointers to unrelated objects.
  return std::less<>()(a.begin, b.end) && std::less<>()(b.begin, a.end);
}

bool same_place(const Span& a, const Span& b) {
  return a.is_own && b.is_own && a.begin == b.begin && a.end == b.end;
}

// The smallest span that contains all spans.
Span hull(const std::vector<Span>& spans) {
  Span all = spans.front();
  for (const Span& span : spans) {
    all.begin = std::min(all.begin, span.begin, std::less<>());
    all.end = std::max(all.end, span.end, std::less<>());
  }
  return all;
}
}  // namespace

std::vector<std::size_t> aliased_inputs(const Request& request, int rank) {
  const std::size_t item_bytes = itemsize(request.dtype);
  const auto inputs = spans_of(request.sends, rank, item_bytes);
  auto outputs = spans_of(request.recvs, rank, item_bytes);
  if (inputs.empty() || outputs.empty() || !overlap(hull(inputs), hull(outputs))) return {};
  std::ranges::sort(outputs, std::less<>(), &Span::begin);
  std::vector<std::size_t> found;
  for (const Span& input : inputs) {
    // Outputs do not overlap each other, so only the first that ends behind the input's begin and
    // those after it can overlap the input.
    auto output = std::ranges::partition_point(
        outputs, [&](const Span& span) { return !std::less<>()(input.begin, span.end); });
    for (; output != outputs.end() && overlap(input, *output); ++output) {
      if (same_place(input, *output)) continue;
      found.push_back(input.index);
      break;
    }
  }
  return found;
}
}  // namespace sdp
