#include "agreement.hpp"

#include <algorithm>

namespace sdp {
namespace {
bool agree(const Announcement& announced, const Announcement& other) {
  const OpSignature& a = announced.operation;
  const OpSignature& b = other.operation;
  if (announced.seq != other.seq || a.op != b.op) return false;
  if (a.op == Op::barrier) return true;
  return a.dtype == b.dtype && a.layout == b.layout &&
         (!reduces(a.op) || a.reduce_op == b.reduce_op) && (!is_rooted(a.op) || a.root == b.root) &&
         (!counts_must_agree(a.op) || a.count == b.count);
}
}  // namespace

Parties disagreement(const Peers& peers, std::uint64_t seq, const std::vector<int>& ranks) {
  const Announcement& mine = peers.own().announcement(seq);
  const auto announced = [&](int r) -> const Announcement& {
    return peers.segment(r).announcement(seq);
  };
  Parties parties;
  if (std::all_of(ranks.begin(), ranks.end(), [&](int r) { return agree(mine, announced(r)); })) {
    return parties;
  }
  for (int r : ranks) {
    const std::string text = describe(announced(r).operation, peers.names());
    const auto same =
        std::find_if(parties.begin(), parties.end(), [&](auto& p) { return p.first == text; });
    if (same == parties.end()) {
      parties.push_back({text, {peers.id(r)}});
    } else {
      same->second.push_back(peers.id(r));
    }
  }
  return parties;
}

std::vector<int> outvoted(const Parties& parties) {
  const auto largest = std::max_element(parties.begin(), parties.end(), [](auto& a, auto& b) {
    return a.second.size() < b.second.size();
  });
  std::vector<int> others;
  for (auto party = parties.begin(); party != parties.end(); ++party) {
    if (party != largest) others.insert(others.end(), party->second.begin(), party->second.end());
  }
  return others;
}

std::string describe(const OpSignature& operation, const RankNames& names) {
  std::string text = operation.title(names);
  if (operation.layout != 0) text += " of fusion layout " + std::to_string(operation.layout);
  return text;
}

std::string describe(const Parties& parties, const RankNames& names) {
  std::string text;
  for (const auto& [operation, ranks] : parties) {
    text.append(" ").append(names.list(ranks)).append(": ").append(operation).append(";");
  }
  text.pop_back();
  return text;
}
}  // namespace sdp
