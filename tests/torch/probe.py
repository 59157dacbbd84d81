"""What a probe of stream semantics is made of; see `stream_probes`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests import simdev
from tests.torch.jobs import assert_same, values

SLOT_NBYTES = 2**16  # small, so that tensors of many pieces are small
PIECE = SLOT_NBYTES // 4
DEADLINE_S = 60.0
DEVICE_POOL = "simdev"  # the device changes torch: a pool for these tests alone

PROBES: dict[str, Callable[[int, int, float], None]] = {}


def probe(function: Callable[[int, int, float], None]) -> Callable[[int, int, float], None]:
    """Add a probe."""
    PROBES[function.__name__] = function
    return function


class Streams(NamedTuple):
    """Those of the group's calls."""

    down: torch.Stream
    up: torch.Stream
    side: torch.Stream


def streams(index: int = 0, group: Any = None) -> Streams:
    """The streams of a group, by default that of all ranks, on a device."""
    calls = (group or dist.group.WORLD)._device_calls[""]
    device = calls._devices[torch.device("simdev", index)]
    return Streams(device.down, device.up, device.side)


@contextmanager
def gated(patience_s: float, *blocked: torch.Stream) -> Iterator[None]:
    """Hold streams (the current one by default) until `patience_s` after the end of the block."""
    gate = simdev.gate()
    for stream in blocked or (torch.accelerator.current_stream(),):
        gate.block(stream)
    try:
        yield
        time.sleep(patience_s)
    finally:
        gate.open()


@contextmanager
def slow_link(nbytes: int, seconds: float) -> Iterator[None]:
    """Let each copy of a size take a while."""
    simdev.set_link(nbytes / seconds)
    try:
        yield
    finally:
        simdev.set_link(0)


def on_device(rank: int, count: int) -> Tensor:
    """A rank's values, there by now."""
    made = values(rank, count).to("simdev")
    torch.accelerator.synchronize()
    return made


def until(done: Callable[[], bool], limit_s: float = DEADLINE_S) -> bool:
    """Wait for a condition; return whether it has come true."""
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def forgotten(work: Any) -> None:
    """Wait until the group no longer keeps the tensors of a work, whose copies may still run."""
    assert until(lambda: all(native.is_completed() for native in work._natives))
    work.is_completed()


def reuses(shape: tuple[int, ...], patience_s: float, address: int = 0) -> list[Tensor]:
    """Allocate memory of a size, and write fives there, until the memory at an address is used."""
    made: list[Tensor] = []

    def again() -> bool:
        made.append(torch.full(shape, 5.0, device="simdev"))
        return made[-1].data_ptr() == address

    until(again, patience_s)
    return made


def assert_fives(tensors: list[Tensor]) -> None:
    torch.accelerator.synchronize()
    for tensor in tensors:
        assert_same(tensor.cpu(), torch.full(tensor.shape, 5.0))
