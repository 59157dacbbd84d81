"""Handles of calls on tensors of an accelerator.

`wait()` orders the current stream behind the result, as users of NCCL expect; the host waits only
until the copies from the CPU are enqueued, which `flagged` has done in the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.core import Work as NativeWork
from sdp_plugins.torch.accelerator.flagged import FlaggedReducer
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.futures import WorkFuture
from sdp_plugins.torch.streams import on
from sdp_plugins.torch.work import PendingWork

POLL_S = 0.001


class DeviceWork(PendingWork):
    """A call whose result is there, in device memory, after an event.

    Args:
        outputs: The tensors that hold the result.
        natives: The operations of the core, or those that stand for a thread's.
        thread: Completes futures.
        finish: Called once after the operations; raises the call's own error.
        pending: The works in flight.
        end: The event; recorded before the last of `natives` is done.
        side: A stream for callbacks of futures.
        group: Fails with the device; None: the call takes no other rank.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        natives: Sequence[NativeWork],
        thread: CallbackThread,
        finish: Callable[[], None] | None,
        pending: dict[PendingWork, None],
        end: torch.Event,
        side: torch.Stream,
        group: Group | None,
    ) -> None:
        super().__init__(outputs, (), natives, thread, finish, pending, None)
        self._end, self._side = end, side
        self._group = group
        self._sparse = [tensor for tensor in outputs if tensor.layout is torch.sparse_coo]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the result; raise the error of a failed operation."""
        super().wait(timeout)
        return self._order_stream()

    def _order_stream(self) -> bool:
        current = torch.accelerator.current_stream(self._side.device)
        try:
            current.wait_event(self._end)
            for tensor in self._sparse:  # has memory of another stream now
                tensor._indices().record_stream(current)
                tensor._values().record_stream(current)
        except RuntimeError as error:  # the device has failed
            if self._group is not None:
                self._group.abort(error)
            raise
        return True

    def is_completed(self) -> bool:
        """Return whether the result is in device memory, or there is an error."""
        if not super().is_completed():
            return False
        try:
            return self.exception() is not None or self._end.query()
        except RuntimeError:  # the device has failed: wait() says so
            return True

    def get_future(self) -> Any:
        """Return a future of the list of result tensors, which orders streams when it is waited."""
        future = WorkFuture(self._thread, side=self._side)
        if super().is_completed():  # the reducer takes the value at once, after wait()
            future.complete_with(self._value)
        else:
            self._thread.when_done(self._natives, lambda: future.complete_with(self._value))
        return future


class FlaggedWork(DeviceWork):
    """A call that is enqueued whole: nothing waits on the host, unless it is given a time.

    Its arguments are those of ``DeviceWork``, without what only threads need.

    Args:
        reducer: Runs the call; None: it takes no other rank.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        natives: Sequence[NativeWork],
        thread: CallbackThread,
        pending: dict[PendingWork, None],
        end: torch.Event,
        side: torch.Stream,
        reducer: FlaggedReducer | None,
    ) -> None:
        group = None if reducer is None else reducer.group
        super().__init__(outputs, natives, thread, None, pending, end, side, group)
        self._reducer = reducer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the result.

        A failure is raised if it is known by now. A later one is raised by the next call, or when
        the group is destroyed; the results are then NaN.

        Args:
            timeout: Wait on the host, for so long at most, until the CPU's part is done.
        """
        if timeout:
            self.settle(timeout)
        if (error := self.exception()) is not None:
            if self._reducer is not None:
                self._reducer.note_failure()
            raise error
        self.is_promised = True
        return super().wait(timeout) if timeout else self._order_stream()

    def settle(self, limit: timedelta) -> None:
        """Wait for the end of the CPU's part, or for the failure of the group, for so long at most.

        After a failure, the core's operations end with the device, which may hang.
        """
        deadline = time.monotonic() + limit.total_seconds()
        while self.exception() is None and not PendingWork.is_completed(self):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def exception(self) -> Any:
        """Return the error, or None if there is none so far."""
        error = super().exception()
        if error is None and not all(native.is_completed() for native in self._natives):
            return None if self._group is None else self._group.failure
        return error

    def get_future(self) -> Any:
        """Return a future that is done: its callbacks run in the thread that adds them."""
        future: Any = torch.futures.Future(devices=[self._side.device])
        self._side.wait_event(self._end)
        with on(self._side):
            future.set_result(self.result())
        return future
