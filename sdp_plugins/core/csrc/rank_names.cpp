#include "rank_names.hpp"

#include <algorithm>

#include "error.hpp"

namespace sdp {

int RankNames::number(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  return rank >= 0 && at < numbers_.size() ? numbers_[at] : rank;
}

std::string RankNames::list(const std::vector<int>& ranks) const {
  std::vector<int> shown;
  shown.reserve(ranks.size());
  for (int rank : ranks) shown.push_back(number(rank));
  std::sort(shown.begin(), shown.end());
  return rank_list(shown);
}
}  // namespace sdp
