"""In a rank: the time of all_reduce on device tensors."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import peer
from benchmarks.gpu.task import Rank

IN_FLIGHT_BYTES = 100 * 2**20
MOST_IN_FLIGHT = 4
WARM_UP = 3  # a backend pins memory in the first calls


def one_by_one(rank: Rank, nbytes: int, calls: int) -> float:
    """Return the microseconds of a call after which the device is idle: median of the calls."""
    tensor, samples = _tensors(rank, [nbytes])[0], []
    rank.meet()
    for _ in range(calls):
        start = time.perf_counter()
        _reduce(rank, [tensor])
        samples.append(time.perf_counter() - start)
    return median(samples) * 1e6


def in_flight(rank: Rank, nbytes: int, calls: int) -> float:
    """Return the microseconds per call with several calls in flight, as DDP's buckets are."""
    number = max(2, min(MOST_IN_FLIGHT, IN_FLIGHT_BYTES // nbytes))
    return together(rank, [nbytes] * number, max(1, calls // number)) / number


def together(rank: Rank, sizes: list[int], rounds: int) -> float:
    """Return the microseconds of reducing tensors that are all in flight: median of the rounds."""
    tensors, samples = _tensors(rank, sizes), []
    rank.meet()
    for _ in range(rounds):
        start = time.perf_counter()
        _reduce(rank, tensors)
        samples.append(time.perf_counter() - start)
    return median(samples) * 1e6


def host_times(rank: Rank, nbytes: int, calls: int) -> dict[str, float]:
    """Return the microseconds that the host spends in the call, in wait(), and until the end."""
    tensor = _tensors(rank, [nbytes])[0]
    found: dict[str, list[float]] = {"call": [], "wait": [], "rest": []}
    rank.meet()
    for _ in range(calls):
        times = [time.perf_counter()]
        work = dist.all_reduce(tensor, group=rank.group, async_op=True)
        times.append(time.perf_counter())
        work.wait()
        times.append(time.perf_counter())
        rank.device.synchronize()
        times.append(time.perf_counter())
        for at, samples in enumerate(found.values()):
            samples.append(1e6 * (times[at + 1] - times[at]))
    return {name: median(samples) for name, samples in found.items()}


def _tensors(rank: Rank, sizes: list[int]) -> list[Tensor]:
    """Return warm tensors of these sizes, the same ones at every call."""
    key = f"tensors {sizes}"
    if key not in rank.kept:
        rank.kept[key] = [torch.zeros(n // 4, device=rank.device.torch) for n in sizes]
        for _ in range(WARM_UP):
            _reduce(rank, rank.kept[key])
    found: list[Tensor] = rank.kept[key]
    return found


def _reduce(rank: Rank, tensors: list[Tensor]) -> None:
    if rank.plays:
        return peer.reduce(rank, [tensor.nbytes for tensor in tensors])
    works = [dist.all_reduce(t, group=rank.group, async_op=True) for t in tensors]
    for work in works:
        work.wait()
    rank.device.synchronize()


def forget(rank: Rank) -> None:
    """Free all tensors and models."""
    rank.kept.clear()
    rank.plays = False
    rank.device.free_cache()
