#include "plan.hpp"

#include "segment.hpp"

namespace sdp {

const char* name(Path path) {
  switch (path) {
    case Path::none:
      return "none";
    case Path::inlined:
      return "inline";
    case Path::staged:
      return "staged";
    case Path::zero_copy:
      return "zero-copy";
  }
  return "none";
}

const char* reason(Path path) {
  switch (path) {
    case Path::none:
      return "nothing has run yet";
    case Path::inlined:
      return "small enough to travel with the announcement";
    case Path::staged:
      return "large, and not every rank's buffer lies in registered memory";
    case Path::zero_copy:
      return "every rank's buffer lies in registered memory";
  }
  return "";
}

Path choose_path(Op op, std::size_t shown_bytes, bool all_registered) {
  if (shown_bytes <= kInlineBytes) return Path::inlined;
  if (op == Op::all_reduce && all_registered) return Path::zero_copy;
  return Path::staged;
}
}  // namespace sdp
