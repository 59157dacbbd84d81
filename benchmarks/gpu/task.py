"""In a rank: carries out functions of this package that the runner names."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.libraries.base import Place
from benchmarks.rank import load
from benchmarks.torch_groups import group_over, join

GLOO = "gloo"
TOLD = 1200  # characters of a traceback


@dataclass
class Rank:
    """What a function of this package gets.

    Attributes:
        place: This rank's position.
        device: Its device.
        backend: The measured backend.
        group: Its group; the default group is gloo's.
        kept: What functions keep for later calls, such as models.
        plays: Whether this rank only does the CPU's part of reductions; see `peer`.
    """

    place: Place
    device: Device
    backend: str
    group: Any
    kept: dict[str, Any] = field(default_factory=dict)
    plays: bool = False

    def meet(self) -> None:
        """Wait for all ranks, by a CPU tensor and with no device operation in flight."""
        self.device.synchronize()
        dist.all_reduce(torch.zeros(1))


class GpuTask:
    """The commands of `gpu` in its ranks.

    Args:
        place: This rank's position.
        device: The type of the device.
        backend: gloo or smddp.
        modules: Imported first, such as one that adds a device to torch; "module:function" is
            called.
        stacks: Start of the name of the file that gets the stacks of a rank that hangs.
    """

    def __init__(
        self, place: Place, device: str, backend: str, modules: list[str], stacks: str
    ) -> None:
        for name in modules:
            module, _, function = name.partition(":")
            if function:
                load(name)()
            else:
                import_module(module)
        self._stacks = Path(f"{stacks}_{place.rank}.txt")
        join(place)
        on = Device(device, place.rank)
        group = dist.group.WORLD if backend == GLOO else group_over(backend)
        self._rank = Rank(place, on, backend, group)

    def describe(self) -> dict[str, Any]:
        """Return the device's name, and versions."""
        return self._rank.device.describe()

    def run(self, target: str, arguments: dict[str, Any], limit_s: float) -> Any:
        """Call the function "module:name" with the Rank.

        Raises:
            RuntimeError: It raised an exception; the text ends with the traceback's last lines.
        """
        with self._watched(limit_s):
            try:
                return load(target)(self._rank, **arguments)
            except Exception as error:
                text = "".join(traceback.format_exception(error))[-TOLD:]
                raise RuntimeError(f"{target}: {text}") from error

    @contextmanager
    def _watched(self, limit_s: float) -> Iterator[None]:
        """Write all threads' stacks into a file shortly before the runner gives up."""
        with self._stacks.open("a") as file:
            faulthandler.dump_traceback_later(max(0.1, 0.9 * limit_s), file=file)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Leave all groups."""
        self._rank.kept.clear()
        dist.destroy_process_group()
