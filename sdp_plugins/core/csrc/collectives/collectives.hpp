// One function per collective. S: bytes of a rank's buffer, N: ranks.
#pragma once

#include "../operation.hpp"

namespace sdp {

// Announces and compares the operation that this is a part of: 1 step, no element moves.
void compare(Operation& op);

// Sum of all ranks' buffers, in place, on all ranks. Small: 1 step, each rank reduces everything.
// Else reduce-scatter and all-gather, 2 hops: rank r reduces the r-th shard and distributes it to
// all. zero-copy: each rank reads S and writes S, without copies; staged: 2S(N-1)/N bytes of copies
// in addition.
void all_reduce(Operation& op);

// As all_reduce, but only the root keeps the result; other ranks' buffers do not change.
void reduce(Operation& op);

// The root shows S bytes, the others copy them: 1 hop.
void broadcast(Operation& op);

// Every rank shows S bytes and copies (N-1) S: 1 hop. Lengths may differ between ranks.
void all_gather(Operation& op);
void gather(Operation& op);   // as all_gather, to the root only
void scatter(Operation& op);  // the root shows N pieces, each rank copies its own

// Every rank shows N pieces and reduces its own from all ranks: 1 hop, S(N-1)/N bytes copied.
void reduce_scatter(Operation& op);

// Every rank shows N pieces and copies one from each rank: 1 hop. All lengths may differ.
void all_to_all(Operation& op);

void barrier(Operation& op);  // ends when all ranks have arrived
}  // namespace sdp
