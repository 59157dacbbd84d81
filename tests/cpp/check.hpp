// The C++ tests' own frame: TEST(name) { CHECK(...); }, run by the main() at the end of this file.
//
// Include it in exactly one source file of a test program. A failed CHECK prints and ends the case;
// the program's exit status is the number of failed cases. An argument runs only the cases whose
// names contain it.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Case = std::pair<const char*, void (*)()>;

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { cases().emplace_back(name, body); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <typename T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

template <typename T>
std::string show(const T& value) {
  if constexpr (Printable<T>) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  } else {
    return "(a value that cannot be printed)";
  }
}

template <typename T>
concept Integer = std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

template <typename A, typename B>
bool same(const A& a, const B& b) {
  if constexpr (Integer<A> && Integer<B>) {
    return std::cmp_equal(a, b);  // signed and unsigned may meet
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!same(a, b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
}

inline bool run(const Case& one) {
  try {
    one.second();
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED %s\n  %s\n", one.first, error.what());
  } catch (...) {
    std::fprintf(stderr, "FAILED %s\n  an exception that is no std::exception\n", one.first);
  }
  return false;
}

inline int run_all(const char* part) {
  int passed = 0, failed = 0;
  for (const Case& one : cases()) {
    if (part && !std::strstr(one.first, part)) continue;
    (run(one) ? passed : failed) += 1;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? failed : (passed ? 0 : 1);  // a run without any case tests nothing
}

}  // namespace check

#define TEST(name)                                                \
  static void test_##name();                                      \
  static const check::Registered name##_case{#name, test_##name}; \
  static void test_##name()

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))

// Waits until the condition holds; fails after some seconds.
#define CHECK_UNTIL(condition)                                   \
  do {                                                           \
    for (int tries = 0; tries < 5000 && !(condition); ++tries) { \
      std::this_thread::sleep_for(std::chrono::milliseconds(1)); \
    }                                                            \
    CHECK(condition);                                            \
  } while (false)

// Passes if `expression` throws an Exception whose what() contains `part`.
#define CHECK_THROWS(expression, Exception, part)                                           \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      (void)(expression);                                                                   \
    } catch (const Exception& error) {                                                      \
      thrown = true;                                                                        \
      if (!std::strstr(error.what(), part)) check::fail(__FILE__, __LINE__, error.what());  \
    }                                                                                       \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " did not throw " #Exception); \
  } while (false)

int main(int argc, char** argv) {
  return check::run_all(argc > 1 ? argv[1] : nullptr);
}
