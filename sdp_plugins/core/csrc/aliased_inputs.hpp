// Finds inputs of an operation that lie in its outputs.
#pragma once

#include <cstddef>
#include <vector>

#include "request.hpp"

namespace sdp {
// Indices of the inputs that would be overwritten before every rank has read them. Only the piece
// that `rank` keeps (the only piece of a list of one) may lie exactly in its output; no other input
// may lie in the outputs' memory. Costs two comparisons per piece if all inputs lie before or
// behind all outputs.
std::vector<std::size_t> aliased_inputs(const Request& request, int rank);
}  // namespace sdp
