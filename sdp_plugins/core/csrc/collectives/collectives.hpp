// One function per collective. S: bytes of a rank's buffer, N: ranks.
#pragma once

#include "../operation.hpp"

namespace sdp {

// Announces the operation that this is a part of and compares: 1 step, no element moves.
void compare(Operation& op);

// Sum of all ranks' buffers, in place, on all ranks. Small: 1 step, each rank reduces everything.
// Else reduce-scatter and all-gather, 2 hops: rank r reduces the r-th shard and hands it to all.
// zero-copy: reads S and writes S per rank and in all no copy; staged: 2S(N-1)/N bytes of copies
// more.
void all_reduce(Operation& op);

// The same, but only the root keeps the result; other ranks' buffers are not changed.
void reduce(Operation& op);

// The root shows S bytes, the others copy them: 1 hop.
void broadcast(Operation& op);

// Every rank shows S bytes and copies (N-1) S, one hop; lengths may differ between ranks.
void all_gather(Operation& op);
void gather(Operation& op);   // the same, to the root only
void scatter(Operation& op);  // the root shows N pieces, each rank copies its own

// Every rank shows N pieces and reduces its own from all: one hop, S(N-1)/N bytes copied.
void reduce_scatter(Operation& op);

// Every rank shows N pieces and copies one from each rank; all lengths may differ: 1 hop.
void all_to_all(Operation& op);

void barrier(Operation& op);  // arrival is all
}  // namespace sdp
