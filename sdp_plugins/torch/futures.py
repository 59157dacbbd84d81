"""Futures of works, completed by one thread of the group.

DDP needs two differences from plain torch futures.

Callbacks (`then`) run on the group's callback thread, in the order in which they were added, and
never in the caller's thread. A callback may issue collectives, as PowerSGD's does. All ranks must
issue them in the same order; running a callback inline if its future is already done would break
that order.

An error becomes the future's value as a `FailedResult`, because Python cannot complete a torch
future with an error. C++ that reads the value raises the original exception.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.futures

from sdp_plugins.core import SdpError
from sdp_plugins.core.errors import add_note
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.streams import on


class FailedResult:
    """The value of a failed future; code that uses it as a tensor raises the original exception.

    torch's C++ (DDP's reducer and its hooks) searches a future's value for tensors with isinstance,
    which asks an object that is no tensor for its `__class__`.

    The error lives as long as the future. It must not keep the frames of its traceback, nor those
    of waiting callers, because these frames hold the future. Python's garbage collector cannot
    traverse the future, which is a C++ object.
    """

    def __init__(self, error: BaseException, on_device: bool = False) -> None:
        self._error = _without_frames(error)
        self._on_device = on_device

    def __reduce__(self) -> Any:
        """Let torch's search for device memory, which pickles what it finds, go on."""
        return str, ()

    def __repr__(self) -> str:
        """Say what happened: C++ shows the value where it needs a tensor."""
        return f"{type(self._error).__name__}: {self._error}"

    def reraise(self) -> NoReturn:
        """Raise a copy of the original exception, which gets the traceback of this call."""
        raise _copied(self._error)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Raise, unless torch's search for tensors asks.

        That search runs in Python, where an exception would become a RuntimeError. Posing as a
        tensor there makes C++ raise the exception when it reads the value. On devices, the search
        would fail, and C++ reads the value in threads that lose the exception: it is shown instead.
        """
        if self._on_device:
            return FailedResult
        if sys._getframe(1).f_code.co_name == "persistent_id":
            return torch.Tensor
        self.reraise()


def _without_frames(error: BaseException) -> BaseException:
    """Convert the traceback to text: frames would keep their local variables and callers alive."""
    if error.__traceback__ is not None and not isinstance(error, SdpError):
        told = "".join(traceback.format_exception(error)).rstrip()
        add_note(error, f"Raised in a callback of a future:\n{told}")
    rest: list[BaseException | None] = [error]
    while rest:
        if (one := rest.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            rest += [one.__cause__, one.__context__]
    return error


def _copied(error: BaseException) -> BaseException:
    try:
        made = copy.copy(error)
    except Exception:  # the class cannot be constructed from its own arguments
        return error
    if type(made) is not type(error):
        return error
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made


def _unwrap(value: Any) -> Any:
    if type(value) is FailedResult:
        value.reraise()
    return value


class WorkFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose callbacks run in order on a thread.

    Args:
        thread: Completes the future and runs its callbacks. If the thread is not in order,
            callbacks are torch's own: the thread that completes the future runs them.
        of_callback: Whether the value is the result of a callback.
        side: For a value in device memory, the stream of callbacks: who waits for the future gets
            its own stream ordered behind it.
    """

    def __init__(
        self,
        thread: CallbackThread,
        of_callback: bool = False,
        side: torch.Stream | None = None,
    ) -> None:
        super().__init__(devices=None if side is None else [side.device])
        self._thread = thread
        self._of_callback = of_callback
        self._side = side
        self._followers: list[Callable[[], None]] = []  # callbacks added by earlier callbacks
        self._completed = threading.Event()
        self._pid = os.getpid()
        self._set_unwrap_func(_unwrap)

    def complete_with(self, call: Callable[[], Any]) -> None:
        """Complete the future with the result of `call`, or with the exception that it raises."""
        with nullcontext() if self._side is None else on(self._side):
            try:
                result = call()
            except BaseException as error:  # a waiter depends on this future, whatever is raised
                result = FailedResult(error, self._side is not None)
            self.set_result(result)
        self._completed.set()
        while self._followers:
            self._followers.pop(0)()

    def _call_back(self, callback: Callable[[Any], Any]) -> Any:
        if self._side is not None:
            with suppress(BaseException):  # the callback sees the error
                super().wait()  # orders the current stream
        return self._thread.call_back(callback, self)

    def wait(self) -> Any:
        """Wait for the value and return it; unlike in torch, Ctrl-C ends the wait."""
        if not self.done():
            if os.getpid() != self._pid:
                raise SdpError(
                    "this process was forked from the one that completes the future. Hint: use the "
                    "group in its own process only.",
                    kind="closed",
                )
            if self._thread.is_current():
                self._thread.run_until(self.done, self._of_callback)  # no other thread would
            else:
                self._completed.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Return a future of the result of `callback(self)`, called after this future is done."""
        if not self._thread.in_order:
            return super().then(callback)
        child = WorkFuture(self._thread, of_callback=True, side=self._side)
        task = partial(child.complete_with, partial(self._call_back, callback))
        if self._thread.is_current() and not self.done():
            # Tasks submitted by a task run immediately, in an order that the main thread cannot
            # change.
            if self._of_callback:
                self._followers.append(task)
                return child
            self._thread.run_until(self.done, callbacks=False)
        self._thread.call_back_when(self.done, task)
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call `callback(self)` after this future is done; as in torch, its exceptions are lost."""
        if self._thread.in_order:
            self.then(callback)
        else:
            super().add_done_callback(callback)
