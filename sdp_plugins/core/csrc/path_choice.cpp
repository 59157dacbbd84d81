#include "path_choice.hpp"

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

Path choose_path(Op op, bool is_step, std::size_t shown_bytes, bool all_registered) {
  if (travels_inline(shown_bytes)) return Path::inlined;
  if (all_registered && (op == Op::all_reduce || is_step)) return Path::zero_copy;
  return Path::staged;
}

std::string explain(Op op, std::size_t shown_bytes, bool all_registered) {
  const Path path = choose_path(op, false, shown_bytes, all_registered);
  return std::string(name(path)) + ": " + reason(path);
}

bool travels_inline(std::size_t shown_bytes) {
  return shown_bytes <= kInlineBytes;
}
}  // namespace sdp
