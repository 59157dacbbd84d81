# Compiles with the clang, the libc++ and the headers of glibc that PyPI's ziglang has, for SDP_TARGET.
#
#   cmake --toolchain tools/zig.cmake -DSDP_TARGET=aarch64-linux-gnu.2.28 ...
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES SDP_TARGET SDP_ZIG)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${SDP_TARGET}")
set(CMAKE_SYSTEM_NAME Linux)
find_program(SDP_ZIG python-zig REQUIRED)
set(CMAKE_CXX_COMPILER ${SDP_ZIG} c++ -target ${SDP_TARGET})
set(CMAKE_AR ${SDP_ZIG})
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qcs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
# nanobind uses stderr, which libc++ does not declare for it.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -Wno-macro-redefined")
