// send and recv: one byte ring per ordered pair of ranks. A thread that calls or waits moves the
// bytes itself as long as it need not sleep. A background thread moves the rest, so that messages
// make progress while a collective waits or the program computes. Messages of a pair arrive in
// order and are matched by tag in the order in which receives were posted, as in MPI. A send is
// complete when the last of its bytes is in the ring.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "communicator.hpp"
#include "message_matching.hpp"
#include "message_rings.hpp"
#include "owned_thread.hpp"
#include "work.hpp"

namespace sdp {

class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  // `spin_us`: as for Engine.
  PointToPoint(std::shared_ptr<Communicator> communicator, int spin_us);
  ~PointToPoint();
  std::shared_ptr<Work> submit(Request request);
  // Takes back a receive that no message has matched: its memory stays unchanged, and the caller
  // finishes its work. Returns its place in the flight recorder; nullopt if a message has matched
  // or the receive has ended.
  std::optional<EventRing::Ticket> take_back(const Work& work);
  // For one node's share of a larger group: the ranks of other nodes have left, so that receives
  // from any rank wait for ranks of this node only.
  void others_have_left();
  void close();

 private:
  // A message that is arriving: into a posted receive, or into `aside` until one is posted.
  struct Incoming {
    bool open = false;
    Envelope envelope{};
    std::uint64_t moved = 0;
    PendingMessage* target = nullptr;
    std::vector<std::byte> aside;
  };

  void drive(const Work& work);
  void loop();
  bool advance(const std::function<bool()>& step);
  void post(Request request, const std::shared_ptr<Work>& work);
  void finish(PendingMessage& pending, const std::optional<Failure>& failure, int source);
  void one_fewer_pending();
  FutexCounter& bell() const { return communicator_->peers().own().header().bell; }
  void post_receive(PendingMessage receive);
  bool progress();
  bool progress_with(int peer);
  bool progress_send(int dst);
  bool progress_recv(int src);
  bool begin_message(int src);
  void finish_message(int src);
  void deliver(PendingMessage& receive, const UnexpectedMessage& message);
  void check_size(const PendingMessage& receive, int src, const Envelope& envelope) const;
  void check_waiting(const std::map<int, Failure>& gone) const;
  void check_one(const PendingMessage& pending, const std::map<int, Failure>& gone) const;
  [[noreturn]] void fail(const PendingMessage& pending, Failure failure) const;
  Failure fail_all(const Failure& why);

  std::shared_ptr<Communicator> communicator_;
  SpinPolicy spin_;
  std::mutex mutex_;  // guards everything below
  MessageRings rings_;
  std::vector<std::deque<PendingMessage>> sends_;  // per destination
  std::vector<Incoming> incoming_;                 // per source
  Matching matching_;
  std::uint64_t seq_ = 0;
  std::size_t pending_ = 0;  // messages in sends_ and matching_
  bool others_left_;         // no rank of another node sends any more
  bool stopping_ = false;
  OwnedThread thread_;
};
}  // namespace sdp
