"""All-reduce that is enqueued whole, in the call: flags order the device and the CPU.

For each piece, of at most a slot:

    down stream   wait until the slot is free; copy down; write the flag `ready`
    core          wait for `ready`; all_reduce with the peers, in shared memory; write `done`
    up stream     wait for `done`; copy up; record the event that the slot is free

The host never waits, and the order in which things are enqueued is one in which they can run: CUDA
may serve two streams by one queue, and cannot see the order that flags impose. Cost: each piece
crosses the link once in each direction, and once the memory of the CPU as in the core's all_reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

import torch

from sdp_plugins.core import Buffer, Group, SdpError
from sdp_plugins.core import Work as NativeWork
from sdp_plugins.torch.accelerator.drivers import Driver
from sdp_plugins.torch.accelerator.pieces import Reduction
from sdp_plugins.torch.accelerator.pinned_ring import SLOTS, PinnedRing
from sdp_plugins.torch.streams import on


class FlaggedReducer:
    """Runs the all-reduces of one group and device.

    Args:
        group: A Group whose only operations these are, on one node.
        ring: Its pinned memory.
        driver: Has flags.
        streams: The streams for copies down and up.
    """

    def __init__(
        self,
        group: Group,
        ring: PinnedRing,
        driver: Driver,
        streams: tuple[torch.Stream, torch.Stream],
    ) -> None:
        self.group, self.ring = group, ring
        self._driver = driver
        self._down, self._up = streams
        self._has_raised = False
        self._copies = driver.streams(*streams)

    def start(self, call: Reduction, event: torch.Event) -> list[NativeWork]:
        """Enqueue a reduction behind the current stream.

        Args:
            call: The reduction.
            event: Recorded when all results are in the tensors.

        Returns:
            The core's operations.
        """
        try:
            return self._start(call, event)
        except BaseException:
            self.note_failure()
            raise

    def _start(self, call: Reduction, event: torch.Event) -> list[NativeWork]:
        self._down.wait_stream(torch.accelerator.current_stream(self._down.device))
        works: list[NativeWork] = []
        pieces = call.addresses()
        for tensor in (*call.tensors, *call.dense):  # first: a part may be accepted, then an error
            tensor.record_stream(self._up)  # which comes after `down`
        with torch.inference_mode():
            while batch := list(islice(pieces, SLOTS)):
                works.append(self._reduce(batch, call))
            with on(self._up):
                call.copy_back()
        event.record(self._up)
        return works

    def _reduce(self, pieces: Sequence[tuple[int, int]], call: Reduction) -> NativeWork:
        """Enqueue the reduction of at most as many pieces as there are slots."""
        dtype, size = call.dtype, call.dtype.itemsize
        slots = [self.ring.take() for _ in pieces]
        flags = [slot.flags for slot in slots]
        buffers, staged = [], []
        for (address, nbytes), slot, flag in zip(pieces, slots, flags, strict=True):
            buffers.append(Buffer(slot.address, nbytes // size, dtype, self.ring))
            staged.append((address, slot.address, nbytes, flag))
        # First: once it is accepted, the core writes the flags however it ends.
        work = self.group.all_reduce_at_flags(buffers, call.op, flags, call.timeout_s)
        is_free = torch.Event(self._up.device)
        with on(self._down):  # the driver's functions need the context of its device
            for event, free in groupby(zip(slots, staged, strict=True), lambda s: s[0].is_free):
                if event is not None:
                    self._down.wait_event(event)
                self._driver.check(self._copies.copy_down([piece for _, piece in free]))
            self._driver.check(self._copies.copy_up(staged))
            is_free.record(self._up)
        for slot in slots:
            slot.is_free = is_free
        return work

    def note_failure(self) -> BaseException | None:
        """Note that somebody will raise the group's error, if there is one; return it."""
        error = self.group.failure
        self._has_raised |= error is not None
        return error

    def unseen_failure(self) -> BaseException | None:
        """Return the group's error if nobody on this rank has raised or caused it; only once."""
        if self._has_raised or (error := self.note_failure()) is None:
            return None
        if isinstance(error, SdpError) and error.kind == "aborted":
            return None if error.origin_rank == self.group.rank else error
        return error
