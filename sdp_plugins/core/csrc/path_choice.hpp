// How an operation moves its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "types.hpp"

namespace sdp {

enum class Path : std::uint8_t {
  none,       // nothing has run yet
  inlined,    // the payload is part of the announcement: one synchronization
  staged,     // through the group's segments, in chunks that stay in the cache
  zero_copy,  // in place, in memory that all ranks have mapped
};
const char* name(Path path);
const char* reason(Path path);

// `is_step`: whether this is a step of a larger group's operation. `shown_bytes`: the most that a
// rank shows to the others. `all_registered`: whether all ranks have announced memory that the
// others can map.
Path choose_path(Op op, bool is_step, std::size_t shown_bytes, bool all_registered);
// The path of an operation that is not a step, and the reason: "staged: large, ...".
std::string explain(Op op, std::size_t shown_bytes, bool all_registered);
// Whether a rank includes its payload in its announcement.
bool travels_inline(std::size_t shown_bytes);
}  // namespace sdp
