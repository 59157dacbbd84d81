#include "ranks.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace ranks {

void Rank::abort(const char* reason) {
  communicator->fail(sdp::Failure(sdp::FailureKind::aborted, reason, {communicator->rank()}));
}

void Rank::close() {
  engine->close();
  point_to_point->close();
}

Links::Links(int size, std::size_t staging_bytes) {
  for (int r = 0; r < size; ++r) {
    segments_.push_back(memfd_create("sdp-test", MFD_CLOEXEC));
    sdp::initialize_segment(segments_.back(), r, size, staging_bytes);
  }
  const std::vector<int> none(static_cast<std::size_t>(size), -1);
  for (int r = 0; r < size; ++r) {
    links_.push_back({r, size, {}, none, none});
    for (int fd : segments_) {
      links_.back().segment_fds.push_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    }
  }
  for (std::size_t a = 0; a < links_.size(); ++a) {
    for (std::size_t b = a + 1; b < links_.size(); ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
        throw std::runtime_error("no socket pair");
      }
      links_[a].sockets[b] = pair[0];
      links_[b].sockets[a] = pair[1];
    }
  }
}

Links::~Links() {
  for (int fd : segments_) ::close(fd);
  for (const auto& rest : links_) {
    for (const auto* fds : {&rest.segment_fds, &rest.sockets, &rest.pidfds}) {
      for (int fd : *fds) {
        if (fd >= 0) ::close(fd);
      }
    }
  }
}

sdp::Links Links::take(int rank) {
  auto& mine = links_[static_cast<std::size_t>(rank)];
  return std::exchange(mine, {});
}

namespace {
// A Failure is likely the echo of what another rank has thrown.
void throw_first(const std::vector<std::exception_ptr>& errors) {
  std::exception_ptr echo;
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const sdp::Failure&) {
      if (!echo) echo = error;
    }
  }
  if (echo) std::rethrow_exception(echo);
}
}  // namespace

World::World(int size, std::size_t staging_bytes, int spin_us, int threads) {
  Links links(size, staging_bytes);
  for (int r = 0; r < size; ++r) {
    auto communicator = std::make_shared<sdp::Communicator>(links.take(r), staging_bytes, threads);
    ranks_.push_back({communicator, std::make_shared<sdp::Engine>(communicator, spin_us),
                      std::make_shared<sdp::PointToPoint>(communicator, spin_us)});
  }
}

void World::each(const std::function<void(int, Rank&)>& body) {
  std::vector<std::exception_ptr> errors(ranks_.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r, (*this)[r]);
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
        // The others would wait for this rank until their time-outs.
        (*this)[r].abort("the test's body has thrown");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  throw_first(errors);
}

std::vector<std::optional<sdp::Failure>> World::failures(
    const std::function<void(int, Rank&)>& body) {
  std::vector<std::optional<sdp::Failure>> caught(ranks_.size());
  each([&](int r, Rank& rank) {
    try {
      body(r, rank);
    } catch (const sdp::Failure& failure) {
      caught[static_cast<std::size_t>(r)] = failure;
    }
  });
  return caught;
}

std::optional<sdp::Failure> failure_of(sdp::Work& work) {
  try {
    if (!work.wait(kTimeoutS)) throw std::runtime_error("a Work was never completed");
  } catch (const sdp::Failure& failure) {
    return failure;
  }
  return std::nullopt;
}

void expect_done(sdp::Work& work) {
  if (const auto failure = failure_of(work)) throw *failure;
}

void expect_failure(const std::optional<sdp::Failure>& failure, sdp::FailureKind kind,
                    const std::string& part) {
  const std::string expected = std::string(sdp::name(kind)) + ": " + part;
  if (!failure) throw std::runtime_error("did not fail; expected " + expected);
  const std::string text = failure->what();
  if (failure->kind != kind || text.find(part) == std::string::npos) {
    throw std::runtime_error(std::string(sdp::name(failure->kind)) + ": " + text + "; expected " +
                             expected);
  }
}

void expect_failure(const std::optional<sdp::Failure>& failure, sdp::FailureKind kind,
                    const std::vector<int>& blamed, const std::string& part) {
  expect_failure(failure, kind, part);
  if (failure->ranks != blamed) {
    throw std::runtime_error("blames " + sdp::rank_list(failure->ranks) + ", not " +
                             sdp::rank_list(blamed) + ": " + failure->what());
  }
}

int open_files() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

sdp::Request request(sdp::Op op, sdp::DType dtype) {
  sdp::Request made;
  made.op = op;
  made.dtype = dtype;
  made.timeout_s = kTimeoutS;
  return made;
}

sdp::FileDescriptor file_of(std::size_t nbytes) {
  sdp::FileDescriptor file(memfd_create("sdp-test", MFD_CLOEXEC));
  if (ftruncate(file.get(), static_cast<off_t>(nbytes)) != 0) {
    throw std::runtime_error("a memory file cannot be made");
  }
  return file;
}

ssize_t send_message(int socket, const void* data, std::size_t nbytes, int file, int flags) {
  iovec part{const_cast<void*>(data), nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (file >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* attached = CMSG_FIRSTHDR(&header);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(attached), &file, sizeof file);
  }
  return sendmsg(socket, &header, flags);
}

sdp::TraceEvent numbered(std::uint64_t number) {
  sdp::TraceEvent event;
  event.seq = event.count = event.nbytes = number;
  event.issued_ns = event.started_ns = event.finished_ns = static_cast<std::int64_t>(number);
  return event;
}

bool whole(const sdp::TraceEvent& event) {
  const auto number = static_cast<std::int64_t>(event.seq);
  return event.count == event.seq && event.nbytes == event.seq && event.issued_ns == number &&
         event.started_ns == number && event.finished_ns == number;
}

sdp::Request in_place(sdp::Op op, sdp::DType dtype, sdp::Piece buffer, int root) {
  sdp::Request made = request(op, dtype);
  made.root = root;
  made.recvs = {buffer};
  return made;
}

sdp::Request all_reduce(std::vector<std::int32_t>& buffer) {
  return in_place(sdp::Op::all_reduce, sdp::DType::int32, piece(buffer));
}

sdp::Request send(sdp::DType dtype, sdp::Piece buffer, int to, std::uint32_t tag) {
  sdp::Request made = request(sdp::Op::send, dtype);
  made.sends = {buffer};
  made.peer = to;
  made.tag = tag;
  return made;
}

sdp::Request recv(sdp::DType dtype, sdp::Piece buffer, int from, std::uint32_t tag) {
  sdp::Request made = request(sdp::Op::recv, dtype);
  made.recvs = {buffer};
  made.peer = from;
  made.tag = tag;
  return made;
}
}  // namespace ranks
