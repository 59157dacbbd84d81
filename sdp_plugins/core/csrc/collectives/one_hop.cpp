#include "one_hop.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

namespace sdp {
namespace {
std::size_t total_bytes(std::span<const Piece> pieces, std::size_t itemsize) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count * itemsize;
  return total;
}

std::size_t pieces_shown(const Request& request, int rank, int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  const bool at_root = rank == request.root;
  switch (request.op) {
    case Op::all_reduce:
    case Op::reduce:
    case Op::all_gather:
    case Op::gather:
      return 1;
    case Op::reduce_scatter:
    case Op::all_to_all:
      return world;
    case Op::broadcast:
      return at_root ? 1 : 0;
    case Op::scatter:
      return at_root ? world : 0;
    default:
      return 0;
  }
}

// Whether the i-th piece is for rank i alone.
bool personal(Op op) {
  return op == Op::scatter || op == Op::all_to_all || op == Op::reduce_scatter;
}

constexpr std::uint64_t kNothing = ~std::uint64_t{0};  // a rank takes nothing from another
constexpr std::uint64_t kMostBytes = std::numeric_limits<std::int64_t>::max();
constexpr int kListed = 8;  // disagreements that a message spells out

void announce_expected(Operation& op, std::span<const Take> takes) {
  std::uint64_t* expected = op.own().expected(op.seq());
  std::fill_n(expected, op.world_size(), kNothing);
  for (const Take& take : takes) expected[take.rank] = take.into.count;
}

// Every rank must expect from each other rank the lengths that it offers. All ranks compare all
// pairs, so that all reach the same verdict before any of them moves an element.
void compare_offers(const Operation& op, const OneHop& hop) {
  std::string what;
  int disagreements = 0;
  std::vector<int> involved(static_cast<std::size_t>(op.world_size()));
  for (int taker = 0; taker < op.world_size(); ++taker) {
    for (int source = 0; source < op.world_size(); ++source) {
      const std::uint64_t expected = op.segment(taker).expected(op.seq())[source];
      if (expected == kNothing) continue;
      const auto piece = static_cast<std::size_t>(personal(op.request().op) ? taker : 0);
      const std::uint64_t offered = piece < hop.n_pieces(source) ? hop.count(source, piece) : 0;
      if (offered == expected) continue;
      ++involved[static_cast<std::size_t>(taker)];
      ++involved[static_cast<std::size_t>(source)];
      if (++disagreements > kListed) continue;
      what.append(what.empty() ? "" : "; ")
          .append(op.names().list({op.id(taker)}))
          .append(" expects ");
      what.append(std::to_string(expected)).append(" elements of ");
      what.append(op.names().list({op.id(source)}));
      what.append(", which offers ").append(std::to_string(offered));
    }
  }
  if (disagreements == 0) return;
  if (disagreements > kListed) what += "; and more";
  // To blame: the ranks that are involved in the most disagreements.
  const int most = *std::max_element(involved.begin(), involved.end());
  std::vector<int> ranks;
  for (int r = 0; r < op.world_size(); ++r) {
    if (involved[static_cast<std::size_t>(r)] == most) ranks.push_back(op.id(r));
  }
  op.fail(FailureKind::mismatch, what, ranks);
}
}  // namespace

OneHop::OneHop(Operation& op, std::span<const Piece> pieces) : op_(op), pieces_(pieces) {
  const Request& request = op.request();
  Announcement announcement = op.announcement();
  announcement.pieces = static_cast<std::uint16_t>(pieces.size());
  announcement.inlined = travels_inline(total_bytes(pieces, op.itemsize()));
  for (std::size_t i = 0; i < pieces.size(); ++i) op.own().splits(op.seq())[i] = pieces[i].count;
  if (announcement.inlined) {
    show_inline();
  } else if (request.part) {
    op.announce_memory(announcement, pieces);
  }
  op.arrive(announcement);

  std::size_t most_bytes = 0;
  bool all_registered = true;
  for (int r = 0; r < op.world_size(); ++r) {
    const std::uint64_t* lengths = op.segment(r).splits(op.seq());
    offers_.emplace_back(lengths, lengths + pieces_shown(request, r, op.world_size()));
    if (!sound(r)) {
      op.fail(op.peers().blame(FailureKind::mismatch, r, " announced impossible pieces",
                               Hint::other_call));
    }
    most_bytes = std::max(most_bytes, shown_by(r) * op.itemsize());
    all_registered = all_registered && (op.announced(r).runs == 1 || shown_by(r) == 0);
    for (std::uint64_t length : offers_.back()) {
      rounds_ = std::max(rounds_, Shards::ceil_div(length, chunk(n_pieces(r))));
    }
  }
  path_ = choose_path(request.op, request.part.has_value(), most_bytes, all_registered);
  if (path_ == Path::zero_copy) find_places();
  op.set_path(path_);
}

std::uint64_t OneHop::shown_by(int rank) const {
  const auto& lengths = offers_[static_cast<std::size_t>(rank)];
  return std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
}

void OneHop::find_places() {
  for (int r = 0; r < op_.world_size(); ++r) {
    const std::uint64_t count = shown_by(r);
    const bool elsewhere = r != op_.rank() && count > 0;
    places_.push_back(elsewhere ? op_.memory_of(r, count, 1)[0].data : nullptr);
  }
}

// A peer may have written anything: none of its values is used as a length or an index before this
// check.
bool OneHop::sound(int rank) const {
  const Request& request = op_.request();
  const bool inlined = op_.announced(rank).inlined != 0;
  if (op_.announced(rank).pieces != n_pieces(rank)) return false;
  const std::uint64_t room = (inlined ? kInlineBytes : kMostBytes) / op_.itemsize();
  std::uint64_t total = 0;
  const auto& offered = offers_[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < offered.size(); ++i) {
    if (offered[i] > room - total) return false;
    // If counts must agree, all ranks' pieces are as long as this rank's.
    const std::uint64_t mine = i < pieces_.size() ? pieces_[i].count : request.count();
    if (counts_must_agree(request.op) && offered[i] != mine) return false;
    total += offered[i];
  }
  return inlined == travels_inline(total * op_.itemsize());
}

std::size_t OneHop::chunk(std::size_t pieces) const {
  const std::size_t bytes = op_.slot_bytes() / pieces / kAlign * kAlign;
  return bytes / op_.itemsize();
}

void OneHop::show_inline() {
  std::byte* to = op_.own().inline_payload(op_.seq());
  for (const Piece& piece : pieces_) {
    const std::size_t bytes = piece.count * op_.itemsize();
    if (bytes > 0) std::memcpy(to, piece.data, bytes);
    to += bytes;
  }
}

void OneHop::show(std::size_t round) {
  const std::size_t step = pieces_.empty() ? 0 : chunk(pieces_.size());
  // The piece that only this rank takes need not be shown.
  const std::size_t own =
      personal(op_.request().op) ? static_cast<std::size_t>(op_.rank()) : pieces_.size();
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    const Piece& piece = pieces_[p];
    const std::size_t begin = std::min<std::size_t>(round * step, piece.count);
    const std::size_t n = p == own ? 0 : std::min<std::size_t>(step, piece.count - begin);
    std::byte* to = op_.own().slot(round) + p * step * op_.itemsize();
    if (n > 0) std::memcpy(to, piece.data + begin * op_.itemsize(), n * op_.itemsize());
  }
}

OneHop::Part OneHop::part(int rank, std::size_t piece, std::size_t round) const {
  const std::uint64_t whole = count(rank, piece);
  if (path_ == Path::inlined) {
    std::uint64_t before = 0;
    for (std::size_t p = 0; p < piece; ++p) before += count(rank, p);
    return {op_.segment(rank).inline_payload(op_.seq()) + before * op_.itemsize(), {0, whole}};
  }
  if (path_ == Path::zero_copy) {
    const auto& lengths = offers_[static_cast<std::size_t>(rank)];
    const std::uint64_t before = std::accumulate(
        lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(piece), std::uint64_t{0});
    const std::byte* first = places_[static_cast<std::size_t>(rank)];
    return {first == nullptr ? nullptr : first + before * op_.itemsize(), {0, whole}};
  }
  const std::size_t step = chunk(n_pieces(rank));
  const std::size_t begin = std::min<std::size_t>(round * step, whole);
  return {op_.segment(rank).slot(round) + piece * step * op_.itemsize(),
          {begin, std::min<std::size_t>(step, whole - begin)}};
}

void copy_exchange(Operation& op, std::span<const Piece> shown, std::span<const Take> takes) {
  // Where lengths may differ from rank to rank, equal announcements do not imply a match.
  const bool compares = !counts_must_agree(op.request().op) && op.request().op != Op::barrier;
  if (compares) announce_expected(op, takes);
  OneHop hop(op, shown);
  if (compares) compare_offers(op, hop);
  for (const Take& take : takes) {
    if (take.rank != op.rank() || take.into.count == 0) continue;
    const std::byte* own = shown[take.piece].data;
    if (take.into.data != own) std::memmove(take.into.data, own, take.into.count * op.itemsize());
  }
  hop.run([&](std::size_t round) {
    for (const Take& take : takes) {
      if (take.rank == op.rank()) continue;
      const auto part = hop.part(take.rank, take.piece, round);
      if (part.range.count == 0) continue;
      std::byte* const into = take.into.data + part.range.begin * op.itemsize();
      op.divide(part.range.count, [&](Range range) {
        const std::size_t begin = range.begin * op.itemsize();
        std::memcpy(into + begin, part.data + begin, range.count * op.itemsize());
      });
    }
  });
}
}  // namespace sdp
