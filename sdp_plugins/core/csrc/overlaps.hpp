// Which memory operations have in common.
#pragma once

#include <cstddef>
#include <vector>

#include "request.hpp"

namespace sdp {
// Indices of the inputs that would be overwritten before every rank has read them. What `rank`
// keeps, in lists of one piece that one, may lie exactly where it is to be; nothing else may lie in
// the outputs' memory. Costs two comparisons per piece where all inputs lie before or behind all
// outputs.
std::vector<std::size_t> aliased_inputs(const Request& request, int rank);

// Whether two operations use some of the same memory.
bool overlaps(const Request& a, const Request& b);
}  // namespace sdp
