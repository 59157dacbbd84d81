// Compares the operations that ranks have announced: all ranks must have called the same.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "peers.hpp"

namespace sdp {

// Distinct operations in words, each with the ids of the ranks that announced it.
using Parties = std::vector<std::pair<std::string, std::vector<int>>>;

// The operations that `ranks` (indices among the peers) have announced with number `seq`; empty if
// all agree with this rank's.
Parties disagreement(const Peers& peers, std::uint64_t seq, const std::vector<int>& ranks);
// To blame: the ids of all ranks outside of the largest party (the first one among equals).
std::vector<int> outvoted(const Parties& parties);

std::string describe(const OpSignature& operation, const RankNames& names);
std::string describe(const Parties& parties, const RankNames& names);
}  // namespace sdp
