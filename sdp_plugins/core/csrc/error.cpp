#include "error.hpp"

#include <array>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace sdp {
namespace {
constexpr std::array<const char*, 7> kKinds{"peer_lost", "timeout", "mismatch",   "shared_memory",
                                            "aborted",   "closed",  "interrupted"};
}  // namespace

const char* name(FailureKind kind) {
  const auto at = static_cast<std::size_t>(kind);
  return at < kKinds.size() ? kKinds[at] : "closed";
}

FailureKind failure_kind(std::string_view name) {
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (name == kKinds[i]) return static_cast<FailureKind>(i);
  }
  throw std::invalid_argument("no group fails by '" + std::string(name) + "'");
}

Failure& Failure::in(const OpSignature& failed, const OpSignature& last, double elapsed) {
  operation = failed;
  op = name(failed.op);
  seq = failed.seq;
  last_completed = last;
  elapsed_s = elapsed;
  return *this;
}

Failure& Failure::in(std::string_view operation_name) {
  op = operation_name;
  return *this;
}

Failure& Failure::compose(const std::string& error_prefix, const RankNames& names, int rank) {
  if (!text_.empty()) return *this;
  if (origin_rank < 0) origin_rank = rank;
  global_ranks = names.global_ranks(ranks);
  global_origin_rank = names.global_rank(origin_rank);
  summary_ = error_prefix;
  if (operation || !op.empty()) {
    summary_.append(operation ? operation->title(names) : op).append(": ");
  }
  if (origin_rank != rank || !origin_name.empty()) {
    summary_.append(origin_name.empty() ? names.list({origin_rank}) : origin_name);
    summary_ += " gave up: ";
    if (origin_operation) summary_.append(origin_operation->title(RankNames())).append(": ");
  }
  std::string_view shown = cause;
  const bool stops = shown.ends_with('.');
  if (stops) shown.remove_suffix(1);
  summary_ += shown;
  text_ = summary_;
  if (last_completed.is_numbered()) {
    text_.append(" (last completed: ").append(last_completed.number()).append(")");
  }
  const std::string_view remedy = text(hint);
  if (stops || operation || !remedy.empty()) text_ += ".";
  if (!remedy.empty()) text_.append(" Hint: ").append(remedy);
  return *this;
}

Failure& Failure::set_text(std::string summary, std::string whole) {
  summary_ = std::move(summary);
  text_ = std::move(whole);
  return *this;
}

const char* Failure::what() const noexcept {
  return text_.empty() ? cause.c_str() : text_.c_str();
}

Failure forked() {
  return {FailureKind::closed,
          "this process was forked from the one that owns the group",
          {},
          Hint::own_process};
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g s", value);
  return text;
}
}  // namespace sdp
