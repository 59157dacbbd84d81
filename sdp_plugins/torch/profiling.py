"""The event of a call in torch's profiler, from its start until it is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.torch.backend_name import BACKEND
from sdp_plugins.torch.callback_thread import CallbackThread
from sdp_plugins.torch.internals import profiling
from sdp_plugins.torch.tensors import tensors_in

END_LIMIT_S = 1.0
OF_DEVICE_CALLS = {
    "_sum_sparse": "sparse_all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
}
"""The names of methods' events, where they differ."""


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


@contextmanager
def enqueuing(method: str, args: Sequence[Any], thread: CallbackThread) -> Iterator[None]:
    """Return a context for a call on tensors of a device.

    As with NCCL, its event ends when the call has been enqueued.

    Args:
        method: The name of the process group's method.
        args: Its arguments; tensors come first: outputs, then inputs.
        thread: Ends the event.
    """
    # A receive shows the event of the call on its CPU copy.
    event = None if not profiling() or method.startswith("recv") else _begin(method, args)
    try:
        yield
    finally:
        if event is not None:
            thread.when_done((), event.end)
            event.wait()


def _begin(method: str, args: Sequence[Any]) -> ProfiledCall | None:
    lists = [tensors for arg in args[:2] if (tensors := list(tensors_in(arg)))]
    return begin(OF_DEVICE_CALLS.get(method, method), lists[-1])
