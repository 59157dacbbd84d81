// Copies to memory that another process reads next.
#pragma once

#include <cstddef>

namespace sdp {

// As memcpy. On x86 it writes past the caches: memory traffic is a third less, because a cache need
// not read what it is about to overwrite. Other threads see the copy after they synchronize with
// this one, as usual.
void streaming_copy(std::byte* target, const std::byte* source, std::size_t nbytes);
}  // namespace sdp
