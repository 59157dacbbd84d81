// Inputs that lie where the outputs of the same operation lie.
#pragma once

#include <cstddef>
#include <vector>

#include "request.hpp"

namespace sdp {
// Indices of the pieces in `sends` that would be overwritten before every rank has read them. What
// `rank` keeps, in lists of one piece that one, may lie exactly where it is to be; nothing else may
// lie in the outputs' memory. Costs two comparisons per piece where all inputs lie before or behind
// all outputs.
std::vector<std::size_t> misplaced(const std::vector<Piece>& sends, const std::vector<Piece>& recvs,
                                   int rank, std::size_t item_bytes);
}  // namespace sdp
