#include "op_signature.hpp"

namespace sdp {

std::string OpSignature::number() const {
  std::string text(name(op));
  if (is_numbered()) text.append(" #").append(std::to_string(seq));
  return text;
}

std::string OpSignature::shape(const RankNames& names) const {
  if (op == Op::barrier) return "";
  std::string text = std::string(name(dtype)) + "[" + std::to_string(count) + "]";
  if (reduces(op)) text.append(" ").append(name(reduce_op));
  if (is_rooted(op)) text += " root " + std::to_string(names.global_rank(root));
  if (op == Op::send) text += " to rank " + std::to_string(names.global_rank(peer));
  if (op == Op::recv)
    text += peer < 0 ? " from any rank" : " from rank " + std::to_string(names.global_rank(peer));
  if (op == Op::send || op == Op::recv) text += " tag " + std::to_string(tag);
  return text;
}

std::string OpSignature::title(const RankNames& names) const {
  const std::string what = shape(names);
  return what.empty() ? number() : number() + " " + what;
}

OpSignature OpSignature::with_global_ranks(const RankNames& names) const {
  OpSignature global = *this;
  if (root >= 0) global.root = names.global_rank(root);
  if (peer >= 0) global.peer = names.global_rank(peer);
  return global;
}
}  // namespace sdp
