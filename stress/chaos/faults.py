"""The faults that a victim causes in its own job, during its rounds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stress.chaos.works import Place

FOREVER_S = 600.0


class ScriptError(Exception):
    """An exception of the user's script."""


def sleep(place: Place) -> None:
    time.sleep(place.job.pause_s)


def fail(place: Place) -> None:
    raise ScriptError("a bug in the training script")


def abort(place: Place) -> None:
    dist.group.WORLD.abort("the victim had enough")  # type: ignore[call-arg, union-attr]
    os._exit(0)


def destroy(place: Place) -> None:
    dist.destroy_process_group()
    time.sleep(FOREVER_S)  # the process lives: the other ranks notice only through the group


def leave(code: int) -> Callable[[Place], None]:
    return lambda place: sys.exit(code)


def meet(place: Place, call: Callable[..., Any], *args: Any) -> None:
    """Run a collective, blocking or asynchronous as the job's work requires."""
    work = call(*args, async_op=place.job.life == "asynchronous")
    if work is not None:
        work.wait()


def usual(place: Place) -> None:
    """Run the collective of the other ranks where a victim's differs."""
    if place.job.fault == "other root":
        meet(place, dist.broadcast, torch.ones(1000), 0)
    elif place.job.fault != "one more":
        meet(place, dist.all_reduce, torch.ones(1000))


def other_dtype(place: Place) -> None:
    meet(place, dist.all_reduce, torch.ones(1000, dtype=torch.float64))


def other_count(place: Place) -> None:
    meet(place, dist.all_reduce, torch.ones(999))


def other_operation(place: Place) -> None:
    output = torch.ones(1000 * place.world)
    meet(place, partial(dist.all_gather_into_tensor, output), torch.ones(1000))


def other_reduction(place: Place) -> None:
    meet(place, dist.all_reduce, torch.ones(1000), dist.ReduceOp.MAX)


def other_root(place: Place) -> None:
    meet(place, dist.broadcast, torch.ones(1000), 1)


def one_more(place: Place) -> None:
    meet(place, dist.all_reduce, torch.ones(7))


def one_less(place: Place) -> None:
    """Skip the collective of the other ranks."""


FAULTS: dict[str, Callable[[Place], None]] = {
    "late": sleep,
    "slow": sleep,
    "raise": fail,
    "abort": abort,
    "destroy": destroy,
    "exit 1": leave(1),
    "exit 0": leave(0),
    "os._exit": lambda place: os._exit(3),
    "other dtype": other_dtype,
    "other count": other_count,
    "other operation": other_operation,
    "other reduction": other_reduction,
    "other root": other_root,
    "one more": one_more,
    "one less": one_less,
}
