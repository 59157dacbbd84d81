"""The order of calls on the same memory, whose callers have not waited in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdp_plugins.core import Work as NativeWork


class _Call(NamedTuple):
    storages: frozenset[int]
    natives: Sequence[NativeWork]
    end: torch.Event


class CallOrder:
    """The calls of one device that may still write results.

    They run one after the other on CPU tensors, and so they do on one stream of NCCL. Here, copies
    down overtake the copies up of earlier calls, unless both are of one storage.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()

    def add(
        self, results: Iterable[Tensor], natives: Sequence[NativeWork], end: torch.Event
    ) -> None:
        """Add a call.

        Args:
            results: The tensors that it writes; they are not kept.
            natives: What is done once `end` is recorded; empty: it is recorded already.
            end: The event after which the results are there.
        """
        self._calls.append(_Call(_storages(results), natives, end))

    def follow(self, tensors: Iterable[Tensor], stream: torch.Stream) -> None:
        """Order a stream behind the earlier calls that write the memory of tensors.

        Where a thread enqueues such a call, the host waits until it has.
        """
        while self._calls and _is_over(self._calls[0]):
            self._calls.popleft()
        storages = _storages(tensors)
        for call in list(self._calls):
            if not storages.isdisjoint(call.storages):
                for native in call.natives:
                    native.wait(None)
                stream.wait_event(call.end)


def _is_over(call: _Call) -> bool:
    try:
        return all(native.is_completed() for native in call.natives) and call.end.query()
    except RuntimeError:  # the device has failed: the call that asks will find that out
        return True


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    dense = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return frozenset(tensor.untyped_storage()._cdata for tensor in dense)
