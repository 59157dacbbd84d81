"""The event of a call in torch's profiler, from its start until it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.internals import profiling

END_LIMIT_S = 1.0


def begin(name: str, tensors: Sequence[Tensor]) -> ProfiledCall | None:
    """Start the event of a call; return None if this thread is not profiled."""
    return ProfiledCall(name, tensors) if profiling() else None


class ProfiledCall:
    """An event such as ``smddp:all_reduce``; it starts on construction.

    A thread other than the calling one must end the event. Otherwise the profiler counts it as a
    function that the calling thread was in all the time, unlike the events of torch's own backends.

    Args:
        name: The operation's name, as in the events of torch's own backends.
        tensors: The tensors of the operation; the profiler may show their shapes.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        record = torch._C._profiler._RecordFunctionFast(f"{BACKEND}:{name}", list(tensors))
        record.__enter__()
        self._records = [record]
        self._ended = threading.Event()
        self._pid = os.getpid()

    def end(self) -> None:
        """End the event."""
        self._records.pop().__exit__(None, None, None)  # frees the record in this thread
        self._ended.set()

    def wait(self) -> None:
        """Wait until the event has ended: a caller may stop the profiler once the call is done.

        The wait is short: losing an event is better than blocking a program.
        """
        if os.getpid() == self._pid:
            self._ended.wait(END_LIMIT_S)
