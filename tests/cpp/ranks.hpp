// N ranks as threads of one process, each with its own Communicator, Engine and PointToPoint over
// memory files and socket pairs, as the rendezvous would have made them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine.hpp"
#include "point_to_point.hpp"

namespace ranks {

// Small slots: a few thousand elements already take several rounds.
inline constexpr std::size_t kStagingBytes = 3 * 16384;
inline constexpr double kTimeoutS = 30;  // nothing in these tests takes as long

struct Rank {
  std::shared_ptr<sdp::Communicator> communicator;
  std::shared_ptr<sdp::Engine> engine;
  std::shared_ptr<sdp::PointToPoint> point_to_point;

  void run(sdp::Request request) {
    engine->run(std::move(request), [] {});
  }
  std::shared_ptr<sdp::Work> submit(sdp::Request request) {
    return engine->submit(std::move(request));
  }
  std::shared_ptr<sdp::Work> post(sdp::Request request) {
    return point_to_point->submit(std::move(request));
  }
  sdp::Header& header() { return communicator->peers().own().header(); }
  void abort(const char* reason);
  void close();  // the group, in good order; the memory stays
};

// What a rendezvous hands to each rank. Descriptors that nobody took are closed.
class Links {
 public:
  Links(int size, std::size_t staging_bytes);
  ~Links();
  sdp::Links take(int rank);  // a new Peers or Communicator owns them
  int segment_fd(int rank) const { return segments_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<int> segments_;
  std::vector<sdp::Links> links_;
};

class World {
 public:
  explicit World(int size, std::size_t staging_bytes = kStagingBytes, int spin_us = -1,
                 int threads = 1);
  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& operator[](int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  // Runs `body` for each rank in a thread of its own and waits for all of them; then throws the
  // first error.
  void each(const std::function<void(int, Rank&)>& body);
  // The same, where failures are expected: what each rank has thrown.
  std::vector<std::optional<sdp::Failure>> failures(const std::function<void(int, Rank&)>& body);

 private:
  std::vector<Rank> ranks_;
};

// What a Work has failed with, at most `kTimeoutS` from now; nothing if it has not.
std::optional<sdp::Failure> failure_of(sdp::Work& work);
void expect_done(sdp::Work& work);
// Throws unless there is a failure of this kind, whose text contains `part`, and which blames these
// ranks.
void expect_failure(const std::optional<sdp::Failure>& failure, sdp::FailureKind kind,
                    const std::string& part);
void expect_failure(const std::optional<sdp::Failure>& failure, sdp::FailureKind kind,
                    const std::vector<int>& blamed, const std::string& part);

int open_files();  // of this process

sdp::FileDescriptor file_of(std::size_t nbytes);  // a new memory file
// What a rank tells another about its registered memory, or what a liar does; as sendmsg returns.
ssize_t send_message(int socket, const void* data, std::size_t nbytes, int file, int flags = 0);

// An event all of whose words say the same, and whether they do.
sdp::TraceEvent numbered(std::uint64_t number);
bool whole(const sdp::TraceEvent& event);

template <class T>
sdp::Piece piece(std::vector<T>& elements) {
  return {reinterpret_cast<std::byte*>(elements.data()), elements.size()};
}

sdp::Request request(sdp::Op op, sdp::DType dtype);
sdp::Request in_place(sdp::Op op, sdp::DType dtype, sdp::Piece buffer, int root = -1);
sdp::Request all_reduce(std::vector<std::int32_t>& buffer);
sdp::Request send(sdp::DType dtype, sdp::Piece buffer, int to, std::uint32_t tag = 0);
sdp::Request recv(sdp::DType dtype, sdp::Piece buffer, int from, std::uint32_t tag = 0);
}  // namespace ranks
