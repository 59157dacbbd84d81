# Builds for aarch64 on another machine and runs the tests in an emulator. On Debian:
#   apt-get install g++-aarch64-linux-gnu qemu-user-static
#   cmake -B build/aarch64 --toolchain tests/cpp/aarch64.cmake -DSDP_BUILD_PYTHON=OFF \
#     -DSDP_BUILD_TESTS=ON && cmake --build build/aarch64 && ctest --test-dir build/aarch64
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
