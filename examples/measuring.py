"""What the example measures: the time of a step, its communication, and the ranks' weights."""

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP_STEPS = 10  # DDP rebuilds its buckets, allocators fill, caches get warm
PAIRS = 25


class StepTimes(Callback):
    """The times of the training steps, from one batch's start to the next within an epoch."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_index) -> None:
        """Take the time."""
        now = time.perf_counter()
        if batch_index > 0:
            self.times_s.append(now - self._started)
        self._started = now

    def median_s(self) -> float:
        """The median step after warm-up, with loading of data, logging and the progress bar."""
        return statistics.median(self.times_s[WARM_UP_STEPS:])


def report(
    path: str | None,
    trainer: Trainer,
    model: nn.Module,
    batch: list[torch.Tensor],
    times: StepTimes,
    accuracy: float,
) -> None:
    """Measure what is left to measure and write all of it to a file, or else to the terminal."""
    if trainer.is_global_zero:
        print("measuring the share of communication: steps with and without it, in turns")
    measured = {
        "accuracy": accuracy,
        "samples_per_s": trainer.world_size * len(batch[0]) / times.median_s(),
        "communication": communication_share(model, batch),
        "weights_equal": equal_on_all_ranks(model),
    }
    dist.destroy_process_group()  # gloo's threads may abort a process that ends without it
    if trainer.is_global_zero:
        text = json.dumps(measured, indent=2)
        Path(path).write_text(text) if path else print(text)


def communication_share(model: nn.Module, batch: list[torch.Tensor]) -> float:
    """The share of a step by which communication makes it longer.

    Steps with and without the exchange of gradients (DDP's no_sync) take turns, so that other load
    on the machine meets both alike; a barrier starts each of them. What overlaps with the backward
    pass costs no time and is not counted; waiting for the slower rank is. The model is a copy: the
    ranks' weights drift apart here.
    """
    ddp = DistributedDataParallel(copy.deepcopy(model).train())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for sync in turns():
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.enable_grad():
            if sync:
                step(ddp, batch)
            else:
                with ddp.no_sync():
                    step(ddp, batch)
        optimizer.step()
        times_s[sync].append(time.perf_counter() - start)
    skip = WARM_UP_STEPS
    alone_s, together_s = (statistics.median(times_s[sync][skip:]) for sync in (False, True))
    return max(0.0, 1 - alone_s / together_s)


def turns() -> Iterator[bool]:
    """Sync, no sync, no sync, sync, ...: neither always follows the other."""
    for pair in range(WARM_UP_STEPS + PAIRS):
        yield from ((True, False) if pair % 2 else (False, True))


def step(ddp: nn.Module, batch: list[torch.Tensor]) -> None:
    """Forward and backward."""
    images, labels = batch
    nn.functional.cross_entropy(ddp(images), labels).backward()


def equal_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank's weights have the same bytes."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1
