"""What the flight recorder adds to a 4 KiB all_reduce: blocks with and without it, in turns.

sdp run -n 2 tools/flight_cost.py core|torch [PAIRS] [CALLS]
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from sdp_plugins.core import Group

NBYTES = 4096


def of_core() -> tuple[Group, Callable[[], object]]:
    group = Group.from_env()
    buffer = np.frombuffer(group.allocate(NBYTES), np.float32)
    return group, lambda: group.all_reduce(buffer)


def of_torch() -> tuple[Group, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    tensor = torch.ones(NBYTES // 4)
    (group,) = (found for found in gc.get_objects() if isinstance(found, Group))
    return group, lambda: dist.all_reduce(tensor)


def block_ns(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls


def main(which: str, pairs: int = 1500, calls: int = 200) -> None:
    group, call = of_torch() if which == "torch" else of_core()
    native = group.issuer.node
    took: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for recorded in (True, False) if pair % 2 else (False, True):
            native.set_recording(recorded)
            call()  # all ranks have switched when it ends
            took[recorded].append(block_ns(call, calls))
    ratios = [on / off for on, off in zip(took[True], took[False], strict=True)]
    with_, without = (statistics.median(took[recorded]) for recorded in (True, False))
    low, middle, high = statistics.quantiles(ratios, n=4)
    if group.rank == 0:
        print(f"{which}, {group.world_size} ranks: {with_:.0f} ns, without it {without:.0f} ns")
        print(f"ratio {middle:.4f} (half of them {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
