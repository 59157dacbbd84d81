// The collectives that move elements without changing them.
#include "collectives.hpp"
#include "one_hop.hpp"

namespace sdp {

void compare(Operation& op) {
  op.arrive(op.announcement());
}

void broadcast(Operation& op) {
  const Piece buffer = op.request().recvs[0];
  const int root = op.request().root;
  if (op.rank() == root) return copy_exchange(op, {&buffer, 1}, {});
  const Take whole{root, 0, buffer};
  copy_exchange(op, {}, {&whole, 1});
}

void all_gather(Operation& op) {
  const Request& request = op.request();
  std::vector<Take> takes;
  for (std::size_t r = 0; r < request.recvs.size(); ++r) {
    takes.push_back({static_cast<int>(r), 0, request.recvs[r]});
  }
  copy_exchange(op, request.sends, takes);
}

// Only the root has outputs, so the other ranks take nothing.
void gather(Operation& op) {
  all_gather(op);
}

void scatter(Operation& op) {
  const Request& request = op.request();
  const Take mine{request.root, static_cast<std::size_t>(op.rank()), request.recvs[0]};
  copy_exchange(op, request.sends, {&mine, 1});
}

void all_to_all(Operation& op) {
  const Request& request = op.request();
  std::vector<Take> takes;
  for (std::size_t r = 0; r < request.recvs.size(); ++r) {
    takes.push_back({static_cast<int>(r), static_cast<std::size_t>(op.rank()), request.recvs[r]});
  }
  copy_exchange(op, request.sends, takes);
}

void barrier(Operation& op) {
  copy_exchange(op, {}, {});
}
}  // namespace sdp
