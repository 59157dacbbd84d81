"""In a rank: training steps of BERT-Medium under DDP on a device."""

from __future__ import annotations

import gzip
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks import bert
from benchmarks.gpu import peer
from benchmarks.gpu.task import Rank
from benchmarks.gpu.trace import hidden_share

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step
TRACED_STEPS = 3
TRACE_BYTES = 5 * 2**20


class Training:
    """A model under DDP over the measured backend, and one batch."""

    def __init__(self, rank: Rank, setting: dict[str, Any]) -> None:
        workload, device = bert.Workload(setting), rank.device.torch
        self._device = rank.device
        made = [workload.build().to(device) for _ in range(2)]
        self._models = [DistributedDataParallel(model, process_group=rank.group) for model in made]
        self._models[0].register_comm_hook(None, noop_hook)
        self._batch = [tensor.to(device) for tensor in workload.batch(0, rank.place.rank)]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in made]

    def step(self, reduce: bool) -> None:
        """Enqueue one step; without `reduce`, DDP fills its buckets, but reduces none."""
        self._models[reduce](*self._batch).backward()
        self._optimizers[reduce].step()
        self._optimizers[reduce].zero_grad()

    def seconds(self, steps: int, reduce: bool) -> float:
        """Return the seconds of a step; the device is idle before the first and after the last."""
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(reduce)
        self._device.synchronize()
        return (time.perf_counter() - start) / steps


def _training(rank: Rank, setting: dict[str, Any]) -> Training:
    """Return the training of a setting, which is kept."""
    key = f"training {setting}"
    if key not in rank.kept:
        rank.kept[key] = Training(rank, setting)
        rank.kept[key].seconds(WARM_UP_STEPS, True)
        rank.kept[key].seconds(WARM_UP_STEPS, False)
    found: Training = rank.kept[key]
    return found


def step_us(
    rank: Rank, setting: dict[str, Any], steps: int, reduce: bool, buckets: list[int] | None = None
) -> float:
    """Return the microseconds of a step, with or without communication.

    Args:
        rank: This rank.
        setting: The workload.
        steps: Number of steps.
        reduce: Whether there is communication.
        buckets: Sizes that ranks without a GPU reduce; see `peer`.
    """
    if rank.plays:
        rank.meet()
        peer.reduce(rank, (buckets or []) * steps if reduce else [])
        return 0.0
    training = _training(rank, setting)
    rank.meet()
    return 1e6 * training.seconds(steps, reduce)


def backward_us(rank: Rank, setting: dict[str, Any], repeats: int, alone: bool) -> float:
    """Return the microseconds of a backward pass without DDP; `alone`: of rank 0 only."""
    if alone and rank.place.rank:
        for _ in range(1 + repeats):
            rank.meet()
        return 0.0
    workload, device = bert.Workload(setting), rank.device
    key = f"model {setting['model']}"
    model = rank.kept.get(key) or workload.build().to(device.torch)
    rank.kept[key] = model
    batch = [tensor.to(device.torch) for tensor in workload.batch(0, rank.place.rank)]
    samples = []
    for _ in range(1 + repeats):
        loss = model(*batch)
        rank.meet()
        start = time.perf_counter()
        loss.backward()
        device.synchronize()
        samples.append(time.perf_counter() - start)
    del loss
    device.free_cache()
    return 1e6 * median(samples[1:])


def bucket_sizes(rank: Rank, setting: dict[str, Any]) -> list[int]:
    """Return the bytes of DDP's buckets, in the order in which they are reduced."""
    model = bert.Workload(setting).build().to(rank.device.torch)
    ddp = DistributedDataParallel(model, process_group=rank.group)
    sizes: list[int] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        sizes.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(state, bucket)

    ddp.register_comm_hook(rank.group, note)
    batch = [t.to(rank.device.torch) for t in bert.Workload(setting).batch(0, rank.place.rank)]
    for _ in range(2):  # the first step's buckets are provisional
        sizes.clear()
        ddp(*batch).backward()
    rank.device.synchronize()
    return list(sizes)


def prepare(rank: Rank, setting: dict[str, Any]) -> None:
    """Make a workload's model under DDP, and warm up, on all ranks."""
    _training(rank, setting)
    rank.device.free_cache()


def trace(
    rank: Rank, setting: dict[str, Any], path: str, buckets: list[int] | None = None
) -> dict[str, float]:
    """Write the first rank's profile of some steps; return what it says of communication."""
    if rank.plays:
        step_us(rank, setting, TRACED_STEPS, True, buckets)
        return {}
    training = _training(rank, setting)
    rank.meet()
    if rank.place.rank:
        training.seconds(TRACED_STEPS, True)
        return {}
    activities = {ProfilerActivity.CPU}
    if rank.device.kind == "cuda":
        activities.add(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        training.seconds(TRACED_STEPS, True)
    plain, packed = Path(path), Path(f"{path}.gz")
    profiler.export_chrome_trace(path)
    with plain.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    found = hidden_share(plain)
    plain.unlink()
    if packed.stat().st_size > TRACE_BYTES:
        packed.unlink()
    return found
