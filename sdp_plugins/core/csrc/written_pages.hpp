// What a process has written into its copy-on-write view of a memory file (see `MappedFile`).
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace sdp {
// Ranges [start, stop) in bytes of the pages that this process has written, and that therefore no
// longer show the file. `view` begins at a page. Asks the kernel for 8 bytes about every page, in
// about 15 ns. Throws Failure(shared_memory) if it does not tell.
std::vector<std::pair<std::size_t, std::size_t>> written_pages(const std::byte* view,
                                                               std::size_t nbytes);

// Drops what was written into [view, view + nbytes), which begins at a page: it shows the file.
// Throws Failure(shared_memory) if the memory is locked.
void drop_pages(std::byte* view, std::size_t nbytes);
}  // namespace sdp
