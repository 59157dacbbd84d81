"""Futures of works, completed by one thread of the group.

Two things differ from plain torch futures, and DDP needs both.

Callbacks (`then`) run on the group's callback thread, in the order in which they were added, and
never in the caller's thread. A callback may issue collectives (PowerSGD's do); all ranks have to
issue them in the same order, which "inline if the future happens to be done" does not give.

An error becomes the future's value as a `FailedResult`, because Python cannot complete a torch
future with an error. C++ that looks at the value raises the original exception.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.futures

from sdp_plugins.core import SdpError
from sdp_plugins.torch.callback_thread import CallbackThread


class FailedResult:
    """The value of a future that failed: whoever takes it for a tensor gets the original exception.

    torch's C++ (DDP's reducer and its hooks) takes tensors out of a future's value with isinstance,
    which asks an object that is no tensor for its `__class__`.

    The error is kept for as long as the future, and must not keep the frames of its traceback, nor
    those of who waits, in which the future itself is. (Python's garbage collector does not see
    through the future, which is C++.)
    """

    def __init__(self, error: BaseException) -> None:
        self._error = _without_frames(error)

    def reraise(self) -> NoReturn:
        """Raise the original exception, or rather a copy, which gets the traceback of this."""
        raise _copied(self._error)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Raise, unless it is torch's search for tensors that asks.

        What is raised in that search, which is Python, becomes a RuntimeError; so be found, and
        raise when C++ takes what was found.
        """
        if sys._getframe(1).f_code.co_name == "persistent_id":
            return torch.Tensor
        self.reraise()


def _without_frames(error: BaseException) -> BaseException:
    """The error, its traceback as text: frames keep what they held, and whoever called them."""
    if error.__traceback__ is not None and not isinstance(error, SdpError):
        told = "".join(traceback.format_exception(error)).rstrip()
        if hasattr(error, "add_note"):
            error.add_note(f"Raised in a callback of a future:\n{told}")
    rest: list[BaseException | None] = [error]
    while rest:
        if (one := rest.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            rest += [one.__cause__, one.__context__]
    return error


def _copied(error: BaseException) -> BaseException:
    try:
        made = copy.copy(error)
    except Exception:  # one that cannot be made from its own arguments
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
        thread: Completes the future and runs its callbacks. Where that is not in order,
            they are torch's own: whoever completes the future runs them.
        of_callback: Whether its value is what a callback returns.
    """

    def __init__(self, thread: CallbackThread, of_callback: bool = False) -> None:
        super().__init__()
        self._thread = thread
        self._of_callback = of_callback
        self._followers: list[Callable[[], None]] = []  # callbacks added by callbacks before it
        self._completed = threading.Event()
        self._pid = os.getpid()
        self._set_unwrap_func(_unwrap)

    def complete_with(self, call: Callable[[], Any]) -> None:
        """Complete with what `call` returns, or with what it raises."""
        try:
            result = call()
        except BaseException as error:  # whatever a callback does, somebody waits for this future
            result = FailedResult(error)
        self.set_result(result)
        self._completed.set()
        while self._followers:
            self._followers.pop(0)()

    def wait(self) -> Any:
        """The value, once it is there; unlike in torch, Ctrl-C ends the wait."""
        if not self.done():
            if os.getpid() != self._pid:
                raise SdpError(
                    "this process was forked from the one that completes the future. Hint: use the "
                    "group in its own process only."
                )
            if self._thread.is_current():
                self._thread.run_until(self.done, self._of_callback)  # nobody else would
            else:
                self._completed.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future of what `callback(self)` returns, called after this one is done."""
        if not self._thread.in_order:
            return super().then(callback)
        child = WorkFuture(self._thread, of_callback=True)
        call = partial(self._thread.call_back, callback, self)
        task = partial(child.complete_with, call)
        if self._thread.is_current() and not self.done():
            # A task's own tasks run at once, in an order that the main thread cannot change.
            if self._of_callback:
                self._followers.append(task)
                return child
            self._thread.run_until(self.done, callbacks=False)
        self._thread.call_back_when(self.done, task)
        return child

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call `callback(self)` after this one is done; what it raises is lost, as in torch."""
        if self._thread.in_order:
            self.then(callback)
        else:
            super().add_done_callback(callback)
