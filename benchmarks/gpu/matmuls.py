"""In a rank: how much matrix products slow down while tensors are reduced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import peer
from benchmarks.gpu.task import Rank

BATCH = 8  # products that are enqueued at once; two batches are in flight


def alone(rank: Rank, side: int, seconds: float) -> dict[str, float]:
    """Return the rate of products on rank 0 without reductions.

    The other ranks do not compute: where ranks share a GPU, it would serve them by turns.
    """
    rank.meet()
    if rank.place.rank:
        return {"products_per_s": 0.0}
    product = _product(rank, side)
    end = time.perf_counter() + seconds
    return {"products_per_s": _rate(rank, product, lambda: time.perf_counter() > end)}


def with_reductions(rank: Rank, side: int, nbytes: int, calls: int) -> dict[str, float]:
    """Return the rates of both while another thread makes `calls` reductions."""
    product = None if rank.place.rank else _product(rank, side)
    reducer = _Reducer(rank, nbytes, calls)
    rank.meet()
    reducer.start()
    rate = _rate(rank, product, lambda: not reducer.is_alive()) if product else 0.0
    reducer.join()
    if reducer.error is not None:
        raise reducer.error
    return {"products_per_s": rate, "reductions_per_s": calls / reducer.seconds}


class _Reducer(threading.Thread):
    """Reduces a tensor again and again, on a stream of its own."""

    def __init__(self, rank: Rank, nbytes: int, calls: int) -> None:
        super().__init__(name="reducer")
        self._rank, self._calls = rank, calls
        self._tensor = torch.zeros(nbytes // 4, device=rank.device.torch)
        for _ in range(0 if rank.plays else 3):
            dist.all_reduce(self._tensor, group=rank.group)
        if rank.plays:
            peer.reduce(rank, [self._tensor.nbytes] * 3)
        self.seconds = 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        """Make the calls; each follows the end of the one before."""
        device = self._rank.device
        try:
            device.enter_thread()
            stream = device.stream()
            start = time.perf_counter()
            with device.using(stream):
                for _ in range(self._calls):
                    if self._rank.plays:
                        peer.reduce(self._rank, [self._tensor.nbytes])
                        continue
                    dist.all_reduce(self._tensor, group=self._rank.group)
                    if (event := device.event(stream)) is not None:
                        event.synchronize()
            self.seconds = time.perf_counter() - start
        except Exception as error:
            self.error = error


def _product(rank: Rank, side: int) -> Callable[[], object]:
    """Return a product of matrices, warmed up."""
    one, other = (
        torch.full((side, side), 0.01, dtype=torch.bfloat16, device=rank.device.torch)
        for _ in range(2)
    )
    out = torch.empty_like(one)
    for _ in range(BATCH):
        torch.mm(one, other, out=out)
    return lambda: torch.mm(one, other, out=out)


def _rate(rank: Rank, product: Callable[[], object], done: Callable[[], bool]) -> float:
    """Return the products per second until `done`, on a stream of their own."""
    device = rank.device
    stream: Any = device.stream()
    device.synchronize()
    count, before = 0, None
    start = time.perf_counter()
    with device.using(stream):
        while not done():
            for _ in range(BATCH):
                product()
            event = device.event(stream)
            if before is not None:
                before.synchronize()
            before, count = event, count + BATCH
        if before is not None:
            before.synchronize()
    return count / (time.perf_counter() - start)
