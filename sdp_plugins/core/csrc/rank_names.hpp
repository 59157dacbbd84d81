// How messages number the ranks of a group: as the job does, where that is known.
#pragma once

#include <string>
#include <vector>

namespace sdp {

class RankNames {
 public:
  // `global_ranks`: of each rank of the group; empty: those that it has there.
  explicit RankNames(std::vector<int> global_ranks = {}) : global_ranks_(std::move(global_ranks)) {}

  int global_rank(int rank) const;  // a peer may have written any number
  std::vector<int> global_ranks(const std::vector<int>& ranks) const;  // ascending
  std::string list(const std::vector<int>& ranks) const;               // "rank 3", "ranks 1, 4-6"

 private:
  std::vector<int> global_ranks_;
};

// "rank 3", "ranks 1, 4-6"
std::string rank_list(const std::vector<int>& ranks);
}  // namespace sdp
