"""A rank of the speed test: `sdp run -n 2 -m sdp_plugins.doctor.speed_rank torch`, or `core`.

Rank 0 prints the result. Libraries alternate from round to round, so that other load affects all
alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from sdp_plugins.core import Group
from sdp_plugins.core.config import MIB
from sdp_plugins.doctor.importing import MARK
from sdp_plugins.doctor.timing import timed

CALLS = {25 * 2**20: (40, 5), 4096: (500, 200)}
"""Bytes of a buffer, and calls of smddp and of gloo in a round.

The calls after another library's find that one's data in the caches: of four calls of smddp, the
median is half as fast as of forty, and as the benchmarks measure.
"""
ROUNDS = 5
WARM_UP = 2
TIMEOUT_S = 30.0
Call = Callable[[], object]
Mean = Callable[[list[int]], list[float]]
"""Takes a rank's values, returns the mean of all ranks'."""


def main() -> None:
    """Entry point."""
    with_torch() if sys.argv[1:] == ["torch"] else with_core()


def measure(
    ours: Call, theirs: Call | None, counts: tuple[int, int], mean: Mean
) -> dict[str, float]:
    """Time alternating rounds of smddp's call and the other one; the fields of a `speed.Case`."""
    calls = [call for call in (ours, theirs) if call]
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call, count in zip(rounds, calls, counts, strict=False):
            for _ in range(WARM_UP):
                call()
            times.append(median(mean(timed(call, count))) / 1e3)
    found = {"us": round(median(rounds[0]), 2)}
    if theirs:
        ratios = (other / own for own, other in zip(*rounds, strict=True))
        found |= {"reference_us": round(median(rounds[1]), 2), "ratio": median(ratios)}
    return found


def report(rank: int, reference: str, cases: list[dict[str, Any]], **notes: str) -> None:
    """Print what was measured, and why what was not."""
    if rank == 0:
        print(MARK + json.dumps({"reference": reference, "cases": cases, **notes}), flush=True)


# ---- smddp against gloo, as torch's programs use both -------------------------------------------


def with_torch() -> None:
    """Measure the all_reduce of torch.distributed."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("smddp", timeout=limit)
    group: Any = dist.group.WORLD
    gloo, no_gloo, not_shared = None, "", ""
    try:
        gloo = dist.new_group(backend="gloo", timeout=limit)
    except RuntimeError as error:  # on all ranks: the interface or the host's name is wrong
        no_gloo = str(error).splitlines()[0]
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    cases = []
    for nbytes, counts in CALLS.items():
        ours, theirs = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
        not_shared = not_shared or _share(ours)
        dist.all_reduce(ours)
        path = group.last_path
        over_smddp = partial(dist.all_reduce, ours)
        over_gloo = None if gloo is None else partial(dist.all_reduce, theirs, group=gloo)
        found = measure(over_smddp, over_gloo, counts, _torch_mean)
        cases.append({"nbytes": nbytes, "path": path, **found})
    reference = "" if gloo is None else "gloo"
    report(dist.get_rank(), reference, cases, no_gloo=no_gloo, not_shared=not_shared)
    dist.destroy_process_group()


def _share(tensor: Any) -> str:
    """Move a tensor into shared memory, as DDP's buckets are; returns why that is impossible."""
    from sdp_plugins.core import SharedMemoryError
    from sdp_plugins.torch import share

    try:
        share(tensor)
    except SharedMemoryError as error:
        return str(error)
    return ""


def _torch_mean(samples: list[int]) -> list[float]:
    import torch
    import torch.distributed as dist

    values = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(values)
    return [float(value) for value in values / dist.get_world_size()]


# ---- the core alone, against copies in memory ---------------------------------------------------


def with_core() -> None:
    """Measure `Group.all_reduce`, where torch is not installed."""
    with Group.from_env(timeout_s=TIMEOUT_S) as group:
        cases = []
        for nbytes, (count, _) in CALLS.items():
            ours = np.frombuffer(group.allocate(nbytes), np.float32)
            source, target = np.zeros((2, nbytes // 4), np.float32)
            group.all_reduce(ours)
            path = group.last_path
            reduce, copy = partial(group.all_reduce, ours), partial(np.copyto, target, source)
            comparable = copy if nbytes >= MIB else None  # a small memcpy meets nobody
            found = measure(reduce, comparable, (count, count), partial(_core_mean, group))
            cases.append({"nbytes": nbytes, "path": path, **found})
        report(group.rank, "memcpy", cases)


def _core_mean(group: Group, samples: list[int]) -> list[float]:
    values = np.array(samples, np.float64)
    group.all_reduce(values, "avg")
    return [float(value) for value in values]


if __name__ == "__main__":
    main()
