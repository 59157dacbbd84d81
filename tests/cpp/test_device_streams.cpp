// Copies and flags are enqueued in an order in which the streams can run, up to the first error.
#include <string>
#include <vector>

#include "check.hpp"
#include "device_streams.hpp"

using namespace sdp;

namespace {
std::vector<std::string> g_enqueued;
std::size_t g_most = 0;  // calls before one fails
constexpr int kCode = 700;

int enqueue(const std::string& what, void* stream) {
  if (g_enqueued.size() == g_most) return kCode;
  g_enqueued.push_back(what + " on " + std::to_string(reinterpret_cast<std::uintptr_t>(stream)));
  return 0;
}
int copy_down(void*, DeviceFunctions::Address device, std::size_t nbytes, void* stream) {
  return enqueue("down " + std::to_string(device) + " " + std::to_string(nbytes), stream);
}
int copy_up(DeviceFunctions::Address device, const void*, std::size_t nbytes, void* stream) {
  return enqueue("up " + std::to_string(device) + " " + std::to_string(nbytes), stream);
}
int write_flag(void* stream, DeviceFunctions::Address flag, std::uint32_t value, unsigned) {
  return enqueue("write " + std::to_string(flag) + " " + std::to_string(value), stream);
}
int wait_flag(void* stream, DeviceFunctions::Address flag, std::uint32_t value, unsigned) {
  return enqueue("wait " + std::to_string(flag) + " " + std::to_string(value), stream);
}

std::uint32_t* word(std::uintptr_t address) {
  return reinterpret_cast<std::uint32_t*>(address);
}
void* stream(std::uintptr_t handle) {
  return reinterpret_cast<void*>(handle);
}

const DeviceStreams kStreams({copy_down, copy_up, write_flag, wait_flag}, stream(1), stream(2));
const StagedPiece kPieces[] = {{100, nullptr, 8, {word(16), word(32), 5}},
                               {200, nullptr, 0, {word(48), word(64), 6}}};

using Calls = std::vector<std::string>;
}  // namespace

TEST(a_flag_follows_the_copy_that_it_tells_of) {
  g_enqueued.clear();
  g_most = 100;
  CHECK_EQ(kStreams.copy_down(kPieces), 0);
  CHECK(g_enqueued == Calls({"down 100 8 on 1", "write 16 5 on 1", "write 48 6 on 1"}));
}

TEST(a_copy_up_follows_the_wait_for_its_result) {
  g_enqueued.clear();
  g_most = 100;
  CHECK_EQ(kStreams.copy_up(kPieces), 0);
  CHECK(g_enqueued == Calls({"wait 32 5 on 2", "up 100 8 on 2", "wait 64 6 on 2"}));
}

TEST(the_first_error_ends_it) {
  for (std::size_t most = 0; most < 3; ++most) {
    g_enqueued.clear();
    g_most = most;
    CHECK_EQ(kStreams.copy_down(kPieces), kCode);
    CHECK_EQ(g_enqueued.size(), most);
    g_enqueued.clear();
    CHECK_EQ(kStreams.copy_up(kPieces), kCode);
    CHECK_EQ(g_enqueued.size(), most);
  }
}
