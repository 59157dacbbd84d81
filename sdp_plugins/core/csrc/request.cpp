#include "request.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "error.hpp"

namespace sdp {
namespace {
[[noreturn]] void invalid(const Request& request, const std::string& what) {
  throw std::invalid_argument(std::string(name(request.op)) + ": " + what);
}

void check_pieces(const Request& request, const char* which, const std::vector<Piece>& pieces,
                  std::size_t expected) {
  if (pieces.size() != expected) {
    invalid(request, std::string("needs ") + std::to_string(expected) + " " + which +
                         " buffer(s), got " + std::to_string(pieces.size()));
  }
  std::uint64_t room = std::numeric_limits<std::int64_t>::max() / itemsize(request.dtype);
  for (const Piece& piece : pieces) {
    if (piece.data == nullptr && piece.count > 0) invalid(request, "a buffer has no memory");
    if (piece.count > room) invalid(request, "the buffers are larger than any memory");
    room -= piece.count;
  }
}
// The piece that a rank keeps must have one size, which can be checked without the other ranks.
void check_own(const Request& request, const Piece& given, const Piece& taken) {
  if (given.count != taken.count) {
    invalid(request, "this rank's own output has " + std::to_string(taken.count) +
                         " elements, its input " + std::to_string(given.count));
  }
}

void check_flags(const Request& request, bool queued) {
  if (!queued || request.part) {
    invalid(request,
            "only an asynchronous collective of a group on one node may wait for a device's flag");
  }
  for (const std::uint32_t* word : {request.device_flags->ready, request.device_flags->done}) {
    if (word == nullptr || reinterpret_cast<std::uintptr_t>(word) % sizeof *word != 0) {
      invalid(request, "a device's flag needs the address of an aligned 32-bit word");
    }
  }
}
}  // namespace

std::uint64_t Request::count() const {
  if (op == Op::all_reduce) {
    return std::accumulate(recvs.begin(), recvs.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const Piece& piece) { return sum + piece.count; });
  }
  std::uint64_t most = 0;
  for (const auto* pieces : {&sends, &recvs}) {
    for (const Piece& piece : *pieces) most = std::max(most, piece.count);
  }
  return most;
}

OpSignature Request::signature(std::uint64_t number) const {
  OpSignature made;
  made.op = op;
  made.dtype = dtype;
  made.reduce_op = reduce_op;
  made.root = root;
  made.peer = peer;
  made.tag = tag;
  made.layout = layout;
  made.count = count();
  made.seq = number;
  return made;
}

void Request::validate(int rank, int world_size, bool queued) const {
  if (!(timeout_s > 0) || std::isinf(timeout_s)) {  // also refuses NaN, which would never expire
    invalid(*this, "the time-out must be positive and finite, not " + seconds(timeout_s) +
                       ". Hint: pass seconds, such as 300, or none for the group's.");
  }
  if (device_flags) check_flags(*this, queued);
  if (part && part->compares_only) return;  // the larger group has validated it
  if (is_rooted(op) && (root < 0 || root >= world_size)) {
    invalid(*this, "root " + std::to_string(root) + " is not a rank of this group of " +
                       std::to_string(world_size));
  }
  const auto world = static_cast<std::size_t>(world_size);
  const auto own = static_cast<std::size_t>(rank);
  const bool at_root = rank == root;
  switch (op) {
    case Op::all_reduce:
      return check_pieces(*this, "in-place", recvs, std::max<std::size_t>(recvs.size(), 1));
    case Op::reduce:
    case Op::broadcast:
      return check_pieces(*this, "in-place", recvs, 1);
    case Op::all_gather:
      check_pieces(*this, "input", sends, 1);
      check_pieces(*this, "output", recvs, world);
      return check_own(*this, sends[0], recvs[own]);
    case Op::reduce_scatter:
      check_pieces(*this, "input", sends, world);
      check_pieces(*this, "output", recvs, 1);
      for (const Piece& piece : sends) {
        if (part) break;  // a segment, whose last piece may be shorter
        if (piece.count != recvs[0].count) invalid(*this, "all pieces must have the output's size");
      }
      return check_own(*this, sends[own], recvs[0]);
    case Op::gather:
      check_pieces(*this, "input", sends, 1);
      check_pieces(*this, "output", recvs, at_root ? world : 0);
      return at_root ? check_own(*this, sends[0], recvs[own]) : void();
    case Op::scatter:
      check_pieces(*this, "input", sends, at_root ? world : 0);
      check_pieces(*this, "output", recvs, 1);
      return at_root ? check_own(*this, sends[own], recvs[0]) : void();
    case Op::all_to_all:
      check_pieces(*this, "input", sends, world);
      check_pieces(*this, "output", recvs, world);
      return check_own(*this, sends[own], recvs[own]);
    case Op::barrier:
      return;
    case Op::send:
      if (peer < 0 || peer >= world_size || peer == rank) {
        invalid(*this, "destination " + std::to_string(peer) +
                           " is not another rank of this group of " + std::to_string(world_size));
      }
      return check_pieces(*this, "input", sends, 1);
    case Op::recv:
      if (peer < -1 || peer >= world_size || peer == rank) {
        invalid(*this, "source " + std::to_string(peer) + " is not another rank of this group of " +
                           std::to_string(world_size));
      }
      return check_pieces(*this, "output", recvs, 1);
  }
}
}  // namespace sdp
