#include "rank_names.hpp"

#include <algorithm>

namespace sdp {

int RankNames::global_rank(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  return rank >= 0 && at < global_ranks_.size() ? global_ranks_[at] : rank;
}

std::vector<int> RankNames::global_ranks(const std::vector<int>& ranks) const {
  std::vector<int> shown;
  shown.reserve(ranks.size());
  for (int rank : ranks) shown.push_back(global_rank(rank));
  std::sort(shown.begin(), shown.end());
  return shown;
}

std::string RankNames::list(const std::vector<int>& ranks) const {
  return rank_list(global_ranks(ranks));
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (first > 0) text += ", ";
    text += std::to_string(ranks[first]);
    if (last == first + 1) last = first;  // "4, 5" reads better than "4-5"
    if (last > first) text.append("-").append(std::to_string(ranks[last]));
    first = last + 1;
  }
  return text;
}
}  // namespace sdp
