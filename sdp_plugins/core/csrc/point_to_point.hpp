// send and recv: one byte ring per ordered pair of ranks, driven by a thread of its own, so that
// they go on while a collective waits. Messages of a pair arrive in order and are matched by tag in
// the order in which receives were posted, as in MPI. A send is complete when its bytes are in the
// ring or taken.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "communicator.hpp"
#include "owned_thread.hpp"
#include "work.hpp"

namespace sdp {

class PointToPoint {
 public:
  explicit PointToPoint(std::shared_ptr<Communicator> communicator);
  ~PointToPoint();
  std::shared_ptr<Work> submit(Request request);
  void close();

 private:
  // What goes before the bytes of each message.
  struct Frame {
    std::uint64_t nbytes;
    std::uint32_t tag;
    DType dtype;
  };
  struct Pending {
    Request request;
    std::shared_ptr<Work> work;
    std::uint64_t seq;
    double started_s;
    std::uint64_t moved = 0;     // bytes, the frame of a send included
    bool matched = false;        // a recv whose message has begun to arrive
    std::int64_t moving_ns = 0;  // since when, if it is traced
  };
  // A message that arrives from one rank: into a posted recv, or aside until one is posted.
  struct Incoming {
    bool open = false;
    Frame frame{};
    std::uint64_t moved = 0;
    Pending* target = nullptr;
    std::vector<std::byte> aside;
  };
  struct Unexpected {
    int source;
    Frame frame;
    std::vector<std::byte> bytes;
  };

  void loop();
  void finish(const Pending& pending, const std::optional<Failure>& failure, int source);
  void post_recv(Pending recv);
  bool progress();
  bool progress_send(int dst);
  bool progress_recv(int src);
  bool begin_message(int src);
  void finish_message(int src);
  bool claim_unexpected(Pending& recv);
  Pending* match(int src, const Frame& frame);
  void check_size(const Pending& recv, int src, const Frame& frame) const;
  void deliver(Pending* recv, int src);
  void check_waiting(const std::map<int, Failure>& gone) const;
  void check_one(const Pending& pending, const std::map<int, Failure>& gone) const;
  [[noreturn]] void fail(const Pending& pending, FailureKind kind, const std::string& what,
                         std::vector<int> ranks) const;
  void fail_all(const Failure& failure);
  std::size_t ring_write(int dst, const std::byte* data, std::size_t nbytes);
  std::size_t ring_read(int src, std::byte* data, std::size_t nbytes);
  std::size_t ring_readable(int src) const;

  std::shared_ptr<Communicator> communicator_;
  std::mutex mutex_;                        // everything below
  std::vector<std::deque<Pending>> sends_;  // per destination
  std::list<Pending> recvs_;                // in the order posted; stable addresses
  std::vector<Incoming> incoming_;          // per source
  std::list<Unexpected> unexpected_;        // in the order arrived
  std::uint64_t seq_ = 0;
  bool stopping_ = false;
  OwnedThread thread_;
};
}  // namespace sdp
