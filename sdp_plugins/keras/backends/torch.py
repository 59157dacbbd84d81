"""Keras on torch: gradients are reduced where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from keras import ops

from sdp_plugins.core.fused import FusedAllReduce

from ..share import DATA, Share, rows, rows_to_read
from ..steps import StatefulStep

if TYPE_CHECKING:
    from sdp_plugins.core import Group


class TorchBackend:
    """See ``Backend``."""

    is_stateless = False

    def __init__(self, group: Group) -> None:
        self._group = group
        self._reduce = FusedAllReduce(group)

    step = staticmethod(StatefulStep)
    rows_to_read = staticmethod(rows_to_read)

    def prepare(self, model: Any) -> None:
        """Nothing."""

    def settle(self, model: Any) -> None:
        """Nothing: they are."""

    def begin(self) -> None:
        """Nothing: calls run when they are made."""

    def passed(self, arrays: Sequence[Any]) -> None:
        """Nothing."""

    @torch.compiler.disable
    @torch.no_grad()
    def average(self, grads: Sequence[Any], factor: Any) -> list[Any]:
        """In place, last layers first."""
        averaged = [grad.contiguous() for grad in grads]
        if factor == 0:
            torch._foreach_zero_(averaged)
        elif factor != 1:
            torch._foreach_mul_(averaged, factor)
        self._reduce(averaged[::-1], "avg")
        return averaged

    def average_of_update(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Keras calls this in updates only."""
        return self.average(grads, 1)

    @torch.compiler.disable
    @torch.no_grad()
    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Of copies."""
        totals = [tensor.detach().clone().contiguous() for tensor in tensors]
        self._reduce(totals, "sum")
        return totals

    @torch.compiler.disable
    @torch.no_grad()
    def gather_rows(self, tensor: Any, share: Share) -> Any:
        """By an uneven all_gather."""
        group = self._group
        lengths = [rows(share.count, rank, group.world_size)[1] for rank in range(group.world_size)]
        whole = tensor.new_empty((share.count, *tensor.shape[1:]))
        group.all_gather_uneven(
            list(whole.split(lengths)), tensor.detach()[: share.rows].contiguous()
        )
        return whole

    def compare(self, data: Any) -> Any:
        """Nothing: the host has seen to it."""
        return data

    def length(self, tensor: Any) -> int:
        """The first dimension."""
        return int(tensor.shape[0])

    def read(self, variable: Any) -> Any:
        """A copy."""
        return variable.value.detach().clone()

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """By Keras."""
        return ops.convert_to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """By Keras."""
        return ops.convert_to_tensor(array)

    def data_of(self, adapter: Any) -> Any:
        """A generator."""
        return (data[DATA] for data in adapter.get_torch_dataloader())

    def example(self, adapter: Any) -> Any:
        """The first batch."""
        return next(iter(adapter.get_torch_dataloader()))


def make(group: Group) -> TorchBackend:
    """The functions of this backend."""
    return TorchBackend(group)


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor on Keras' device."""
    return ops.convert_to_tensor(array)


def same_order(loader: Any, seed: int) -> Iterator[Any]:
    """Iterate over a DataLoader; what its samplers draw from torch's own generator is seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batches = iter(loader)
        try:
            first = next(batches)  # samplers draw when they are asked for the first time
        except StopIteration:
            return
    yield first
    yield from batches
