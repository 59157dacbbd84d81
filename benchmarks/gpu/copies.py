"""In a rank: copies between host and device, which bound every reduction that is staged."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.task import Rank
from sdp_plugins.core import Group

DIRECTIONS = {"down": (True, False), "up": (False, True), "down + up": (True, True)}
"""Whether a copy from the device, and one to it."""


def pinned(rank: Rank, nbytes: int, calls: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of copies from and to memory that torch has pinned."""
    hosts = [rank.device.pinned(nbytes) for _ in range(2)]
    return _measured(rank, hosts, calls, rounds)


def registered(rank: Rank, nbytes: int, calls: int, rounds: int) -> dict[str, float]:
    """Return the same for shared memory of the core, pinned where it lies."""
    with Group.from_env(name="gpu-copies") as group:
        memory = torch.frombuffer(group.allocate(2 * nbytes), dtype=torch.uint8)
        with rank.device.registered(memory):
            found = _measured(rank, list(memory.split(nbytes)), calls, rounds)
        del memory
    return found


def _measured(rank: Rank, hosts: list[Tensor], calls: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of every direction, of one rank and of all at once."""
    there = [torch.zeros_like(host, device=rank.device.torch) for host in hosts]
    streams = [rank.device.stream() for _ in hosts]
    ends = list(zip(hosts, there, streams, strict=True))
    found = {}
    rank.meet()
    if rank.place.rank == 0:
        found["up, just written by the CPU, one rank"] = _copy_written(rank, ends, calls)
    rank.meet()
    for who, active in {"one rank": rank.place.rank == 0, "all ranks": True}.items():
        for name, directions in DIRECTIONS.items():
            _copy(rank, ends, directions, 1)
            samples = []
            for _ in range(rounds):
                rank.meet()
                samples.append(_copy(rank, ends, directions, calls) if active else 0.0)
            rank.meet()
            found[f"{name}, {who}"] = median(samples)
    return found


def _copy_written(rank: Rank, ends: list[Any], calls: int) -> float:
    """Return the microseconds of a copy up of what is in the caches of the CPU's cores."""
    samples = []
    for value in range(calls):
        ends[1][0].fill_(value)
        samples.append(_copy(rank, ends, (False, True), 1))
    return median(samples)


def _copy(rank: Rank, ends: list[Any], directions: tuple[bool, bool], calls: int) -> float:
    """Return the microseconds of a copy; each direction has memory and a stream of its own."""
    rank.device.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        for up, ((host, there, stream), wanted) in enumerate(zip(ends, directions, strict=True)):
            if wanted:
                with rank.device.using(stream):
                    to, of = (there, host) if up else (host, there)
                    to.copy_(of, non_blocking=True)
    rank.device.synchronize()
    return (time.perf_counter() - start) / calls * 1e6
