"""What torch's profiler shows of a call: an event from its start until it is done."""

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
    """The event of a call that begins now; None if nobody profiles this thread."""
    return ProfiledCall(name, tensors) if profiling() else None


class ProfiledCall:
    """An event such as ``smddp:all_reduce``; it begins here and now.

    It is to be ended in another thread than the one that called: the profiler takes the others for
    functions that the calling thread was in all the time, which torch's own backends never show.

    Args:
        name: Of the operation, as in the events of torch's own backends.
        tensors: What it works on; the profiler may show their shapes.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        record = torch._C._profiler._RecordFunctionFast(f"{BACKEND}:{name}", list(tensors))
        record.__enter__()
        self._records = [record]
        self._ended = threading.Event()
        self._pid = os.getpid()

    def end(self) -> None:
        """End it now."""
        self._records.pop().__exit__(None, None, None)  # and its end, or it ended where that came
        self._ended.set()

    def wait(self) -> None:
        """Wait until it has ended: whoever sees the call done may stop the profiler.

        Not for long: an event may get lost, but nobody's program.
        """
        if os.getpid() == self._pid:
            self._ended.wait(END_LIMIT_S)
