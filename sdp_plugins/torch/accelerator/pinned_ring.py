"""Staging memory of an accelerator's reductions: slots of pinned memory that the peers map."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from sdp_plugins.core import Group
from sdp_plugins.core.config import PAGE
from sdp_plugins.torch.accelerator.drivers import Driver
from sdp_plugins.torch.streams import on

log = logging.getLogger(__name__)

SLOT_NBYTES = 4 * 2**20
"""Large enough that enqueuing a copy costs little of it, small enough to overlap with the next."""
SLOTS = 16
_DRAIN_S = 10.0


class Slot:
    """A piece of staging memory.

    Attributes:
        address: Where it begins.
        ready: Address of the flag that the device writes after its copy into the slot.
        done: Address of the flag that the CPU writes when the slot holds the result.
        value: What the flags are set to in the present use.
        is_free: The event after which the device has read the slot's last result; None: it has.
    """

    __slots__ = ("_memory", "_part", "address", "done", "is_free", "ready", "value")

    def __init__(self, memory: torch.Tensor, flags: int) -> None:
        self._memory = self._part = memory
        self.address = memory.data_ptr()
        self.ready, self.done = flags, flags + 4
        self.value = 0
        self.is_free: torch.Event | None = None

    @property
    def flags(self) -> tuple[int, int, int]:
        """The addresses of both flags, and their value."""
        return self.ready, self.done, self.value

    def part(self, nbytes: int) -> torch.Tensor:
        """Return the first bytes of it, as a CPU tensor."""
        if self._part.numel() != nbytes:
            self._part = self._memory[:nbytes]
        return self._part


class PinnedRing:
    """Slots that are used in turn, pinned once, in shared memory of a Group.

    The first page holds the flags. Memory that cannot be pinned serves as well: torch then copies
    synchronously.

    Args:
        group: Reduces the slots.
        device: The accelerator, with an index.
        driver: Pins the memory; None: torch allocates pinned memory, which the peers do not map.
    """

    def __init__(self, group: Group, device: torch.device, driver: Driver | None) -> None:
        self._device, self._driver = device, driver
        nbytes = PAGE + SLOTS * SLOT_NBYTES
        self.is_pinned = False
        if driver is None:
            self.memory = _allocate(nbytes)
        else:
            self.memory = torch.frombuffer(group.allocate(nbytes), dtype=torch.uint8)
            try:
                with _context_of(device):
                    driver.pin(self.memory.data_ptr(), nbytes)
                self.is_pinned = True
            except RuntimeError as error:
                log.warning(
                    "smddp cannot pin %d MiB of memory for %s (%s): copies are slower. Hint: raise "
                    "the limit of locked memory (ulimit -l), or free memory.",
                    nbytes // 2**20,
                    device,
                    error,
                )
        flags, start = self.memory.data_ptr(), PAGE
        self._slots = []
        for index in range(SLOTS):
            memory = self.memory[start : start + SLOT_NBYTES]
            self._slots.append(Slot(memory, flags + 8 * index))
            start += SLOT_NBYTES
        self._next = 0

    def take(self) -> Slot:
        """Return the slot that has rested longest; its user waits for its event."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        slot.value = (slot.value + 1) % 2**32
        return slot

    def close(self, *streams: torch.Stream) -> None:
        """Unpin the memory once the device is done with it; no slot may be taken any more.

        Args:
            streams: All that copy into slots or from them. A slot's event does not tell: after a
                failure, results go up although a copy down still waits for the program's work.
        """
        if not self.is_pinned or self._driver is None:
            return
        self.is_pinned = False
        deadline = time.monotonic() + _DRAIN_S
        with suppress(RuntimeError):  # of a device that has failed: no copy runs any more
            while not all(stream.query() for stream in streams):
                if time.monotonic() > deadline:
                    log.warning("smddp leaves memory pinned: a copy still waits for its stream.")
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))  # and mapped
                    return
                time.sleep(0.001)
        with suppress(RuntimeError), _context_of(self._device):
            self._driver.unpin(self.memory.data_ptr())


@contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """Make a device's context the calling thread's; a new thread may have none."""
    stream = torch.accelerator.current_stream(device)
    with on(stream):
        stream.query()
        yield


def _allocate(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8)
