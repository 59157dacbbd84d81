// TensorFlow's headers name functions of FarmHash, whose own header its package lacks. None of them
// is called here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace util {
struct uint128_t {
  uint64_t low, high;
};
uint32_t Fingerprint32(const char* data, size_t length);
uint64_t Fingerprint64(const char* data, size_t length);
uint128_t Fingerprint128(const char* data, size_t length);
uint64_t Uint128Low64(const uint128_t& number);
uint64_t Uint128High64(const uint128_t& number);
}  // namespace util
