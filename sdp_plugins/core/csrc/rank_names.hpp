// Numbers of a group's ranks in messages: those of the job, if known.
#pragma once

#include <string>
#include <vector>

namespace sdp {

class RankNames {
 public:
  // `global_ranks`: the job's number of each rank of the group; empty: the same as in the group.
  explicit RankNames(std::vector<int> global_ranks = {}) : global_ranks_(std::move(global_ranks)) {}

  int global_rank(int rank) const;  // accepts any number: a peer may have written it
  std::vector<int> global_ranks(const std::vector<int>& ranks) const;  // ascending
  std::string list(const std::vector<int>& ranks) const;               // "rank 3", "ranks 1, 4-6"

 private:
  std::vector<int> global_ranks_;
};

// "rank 3", "ranks 1, 4-6"
std::string rank_list(const std::vector<int>& ranks);
}  // namespace sdp
