"""Handles of c10d calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import Work as NativeWork
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.futures import WorkFuture
from sdp_plugins.torch.profiling import ProfiledCall


class Work(dist.Work):  # type: ignore[name-defined]
    """A finished call; `thread` completes its futures."""

    _natives: Sequence[NativeWork] = ()

    def __init__(self, outputs: Sequence[Tensor], thread: CallbackThread) -> None:
        super().__init__()
        self._outputs = outputs
        self._thread = thread

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; raise the error of a failed operation.

        Args:
            timeout: How long to wait; None and zero mean the operation's own timeout.
        """
        return True

    def is_completed(self) -> bool:
        """Return whether there is a result or an error."""
        return True

    def is_success(self) -> bool:
        """Return whether there is a result."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the error, or None if there is none so far."""
        return None

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Wait: work on CPU tensors has no stream to queue on."""
        self.wait()

    def source_rank(self) -> int:
        """Return the sender, for a receive from any source."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the list of result tensors."""
        future = WorkFuture(self._thread)
        if self.is_completed():
            future.complete_with(self._value)
        else:
            self._thread.when_done(self._natives, partial(future.complete_with, self._value))
        return future

    def _value(self) -> list[Tensor]:
        self.wait()
        return self.result()


class PendingWork(Work):
    """A call's operations in the core, and the steps that follow when they are done.

    Attributes:
        is_promised: Whether wait() has returned, although the result is still to come.

    Args:
        outputs: The tensors that hold the result.
        inputs: Other tensors that the operations read; they live until the operations are done.
        natives: The core's operations.
        thread: Completes futures.
        finish: Called once after the operations, before the work appears as done.
        pending: The works in flight; this one leaves them when it is done.
        event: The event of torch's profiler, which another thread ends with the operations.
    """

    is_promised = False

    def __init__(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        natives: Sequence[NativeWork],
        thread: CallbackThread,
        finish: Callable[[], None] | None,
        pending: dict[PendingWork, None],
        event: ProfiledCall | None,
    ) -> None:
        super().__init__(outputs, thread)
        self._inputs = inputs
        self._natives = natives
        self._finish = finish
        self._pending = pending
        self._lock = threading.RLock()  # a signal handler may query the work during a query
        self._done = False
        self._failure: Exception | None = None  # raised by `finish`
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operations, and run the steps that follow them."""
        limit_s = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + limit_s if limit_s > 0 else None
        try:
            for native in self._natives:
                native.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            self.is_completed()
        if self._failure is not None:
            raise self._failure
        if self._event is not None:
            self._event.wait()
        return True

    def settle(self, limit: timedelta) -> None:
        """Wait for so long at most; its caller has not asked for an error."""
        with suppress(Exception):
            self.wait(limit)

    def is_completed(self) -> bool:
        """Return whether there is a result or an error; run what follows finished operations."""
        if self._done:
            return True
        with self._lock:
            if not self._done and all(native.is_completed() for native in self._natives):
                self._complete()
            return self._done

    def _complete(self) -> None:
        try:
            finish = self._finish  # a signal handler may interrupt here and do all of this
            if finish is not None and self.exception() is None:
                finish()
        except Exception as error:  # raised to the caller that waits, not to one that only queries
            self._failure = error
        finally:
            self._inputs, self._finish, self._done = (), None, True
            self._pending.pop(self, None)

    def exception(self) -> Any:
        """Return the error, or None if there is none so far."""
        failures = (native.exception() for native in self._natives)
        return next((e for e in failures if e is not None), self._failure)

    def source_rank(self) -> int:
        """Return the sender, for a receive from any source."""
        return int(self._natives[0].source_rank)

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part; the call then ends soon after the last has joined."""
        return self._thread.in_order

    def touches(self, storage: int) -> bool:
        """Return whether one of the tensors lies in the storage with this `_cdata`."""
        dense = (t for t in (*self._outputs, *self._inputs) if t.layout is torch.strided)
        return any(t.untyped_storage()._cdata == storage for t in dense)
