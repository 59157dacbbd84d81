"""Two ranks sum arrays of several sizes and types; each is started by hand with its rank."""

import os
import sys

import numpy as np

rank, port = sys.argv[1:]
os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, LOCAL_WORLD_SIZE="2")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

from sdp_plugins.core import Group  # noqa: E402

with Group.from_env(timeout_s=300) as group:
    for count in (1, 1000, 3_000_000):  # inline, staged in one piece, in several
        for dtype in ("float16", "float32", "int64", "complex64"):
            ours = (np.arange(count) % 7).astype(dtype)
            group.all_reduce(ours)
            assert (ours == (np.arange(count) % 7 * 2).astype(dtype)).all(), (count, dtype)
print(f"rank {rank} has the right sums on {os.uname().machine}")
