"""All-reduce for devices and groups without flags: a thread waits for the device's copies.

Copies down are enqueued as long as there are free slots, by the call or by the thread. The thread
waits for the oldest one, lets the core reduce that slot, and enqueues its copy up. Copies in both
directions, the reduction and what else the device computes overlap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sdp_plugins.core import Buffer, CollectiveTimeoutError, Group
from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.torch.accelerator.pieces import Reduction
from sdp_plugins.torch.accelerator.pinned_ring import SLOTS, PinnedRing, Slot
from sdp_plugins.torch.streams import on

MIN_POLL_S, MAX_POLL_S = 20e-6, 1e-3
Streams = tuple[torch.Stream, torch.Stream]
"""For copies down and up."""


class _Copied(NamedTuple):
    """A piece whose copy down is enqueued, with the event of its end."""

    piece: Tensor
    slot: Slot
    event: torch.Event


class Reducing:
    """A reduction on its way.

    Args:
        call: What is reduced.
        ring: The staging memory of its device.
        streams: The device's streams.
        start: The event after which the tensors may be read.
        end: An event to record when all results are in the tensors.
    """

    def __init__(
        self,
        call: Reduction,
        ring: PinnedRing,
        streams: Streams,
        start: torch.Event,
        end: torch.Event,
    ) -> None:
        self._call, self._ring = call, ring
        self._down, self._up = streams
        self._end = end
        self._pieces = call.pieces()
        self.copied: deque[_Copied] = deque()
        self._start: torch.Event | None = start
        self.is_copied = False  # whether all copies down are enqueued

    def copy_down(self) -> bool:
        """Enqueue the next copy down; return whether there was one."""
        piece, down = next(self._pieces, None), self._down
        if piece is None:
            self.is_copied = True
            return False
        if self._start is not None:
            down.wait_event(self._start)
            self._start = None
        slot = self._ring.take()
        part = slot.part(piece.numel())
        if slot.is_free is not None:
            down.wait_event(slot.is_free)
        with on(down):
            part.copy_(piece, non_blocking=True)
        event = torch.Event(down.device)
        event.record(down)
        self.copied.append(_Copied(piece, slot, event))
        return True

    def reduce_oldest(self, group: Group) -> None:
        """Reduce the oldest copy, and enqueue the copy of its result up."""
        piece, slot, event = self.copied[0]
        call = self._call
        await_device(event, group, "all_reduce", call.timeout_s)
        buffer = Buffer(slot.address, piece.numel() // call.dtype.itemsize, call.dtype, self._ring)
        group.all_reduce(buffer, call.op, timeout_s=call.timeout_s)
        with on(self._up):
            piece.copy_(slot.part(piece.numel()), non_blocking=True)
        slot.is_free = self._up.record_event()
        self.copied.popleft()

    def finish(self) -> None:
        """Enqueue what follows the last copy up."""
        with on(self._up):
            self._call.copy_back()
        self._end.record(self._up)


def await_device(event: torch.Event, group: Group, name: str, timeout_s: float | None) -> None:
    """Wait for an event; fail the group if the device does not reach it within the time-out.

    ``event.synchronize()`` would have no deadline, and would not notice that the group is closed.
    """
    began, limit_s = time.monotonic(), group.timeout_s if timeout_s is None else timeout_s
    while not event.query():
        waited_s = time.monotonic() - began
        group.raise_if_failed()
        if waited_s > limit_s:
            who = name_ranks([group.global_rank(group.rank)])
            why = f"{name}: {who}'s device has not reached the operation in {limit_s:.3g} s"
            error = CollectiveTimeoutError(
                f"{group.error_prefix}{why}. Hint: earlier work in the device's stream has not "
                "ended; look for a kernel that hangs or that waits for another rank. If it is only "
                "slow, raise the group's timeout.",
                ranks=[group.rank],
                op=name,
                elapsed_s=waited_s,
            )
            group.abort(why)
            raise error
        time.sleep(min(max(waited_s / 20, MIN_POLL_S), MAX_POLL_S))


class ThreadedReducer:
    """Runs the all-reduces of a group, on its devices.

    Args:
        group: Takes no operations from other threads than the one that calls `run`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._incomplete: deque[Reducing] = deque()  # those with pieces that wait for a slot
        self._in_flight = 0

    def start(self, reducing: Reducing) -> Callable[[], None]:
        """Enqueue the first copies; return what the thread runs, in the order of the calls."""
        with self._lock:
            self._incomplete.append(reducing)
        self._copy_down()
        return lambda: self._run(reducing)

    def _copy_down(self) -> None:
        """Enqueue copies into free slots, in the order of the calls."""
        with self._lock, torch.inference_mode():
            try:
                while self._incomplete and self._in_flight < SLOTS:
                    if self._incomplete[0].copy_down():
                        self._in_flight += 1
                    else:
                        self._incomplete.popleft()
            except BaseException:
                self._incomplete.clear()  # the caller ends the group
                raise

    def _run(self, reducing: Reducing) -> None:
        try:
            with torch.inference_mode():
                while reducing.copied:
                    reducing.reduce_oldest(self._group)
                    with self._lock:
                        self._in_flight -= 1
                    self._copy_down()
                self._group.raise_if_failed()
                assert reducing.is_copied, "a call has failed without ending its group"
                reducing.finish()
        finally:
            with self._lock:  # after an error: what is left is not reduced
                self._in_flight -= len(reducing.copied)
                if reducing in self._incomplete:
                    self._incomplete.remove(reducing)
