"""A model's buffers, which all ranks take from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdp_plugins.core import Group
from sdp_plugins.torch.sharding.layout import ALIGNMENT


class SynchronizedBuffers:
    """Gives all ranks rank 0's buffers before each forward pass of the training, as DDP does.

    In evaluation nothing is sent but by `synchronize`, so that one rank may evaluate alone.

    Args:
        group: All ranks.
        model: Whose forward passes are meant.
        synchronizing: Whether ranks communicate; in ``no_sync`` they do not.
    """

    def __init__(self, group: Group, model: nn.Module, synchronizing: Callable[[], bool]) -> None:
        self._group, self._synchronizing = group, synchronizing
        broadcast(group, list(model.buffers()))
        self._due = True
        self._model = model
        self._hook = model.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        """Before a forward pass; not if the one before was in ``no_sync``, as under DDP."""
        if model.training and torch.is_grad_enabled() and not self._group.closed:
            self.synchronize()
            self._due = self._synchronizing()

    def synchronize(self) -> None:
        """Send the buffers, unless nothing was trained since they were sent; a collective."""
        if self._due:
            broadcast(self._group, list(self._model.buffers()))
        self._due = False

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing  # a copy of the model, as for an average of weights, is not trained

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_copies, ()  # nor is one that was saved

    def leave(self) -> None:
        """Send nothing any more."""
        self._hook.remove()


def _nothing(model: nn.Module, inputs: Any) -> None:
    """The hook of a copy of the model."""


def _hook_of_copies() -> Callable[..., None]:
    return _nothing


@torch.no_grad()
def broadcast(group: Group, tensors: Sequence[Tensor]) -> None:
    """Give all ranks rank 0's tensors, in one message; a collective."""
    if not tensors:
        return
    memory, views = _space_for(tensors)
    if group.rank == 0:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    group.broadcast(memory, 0)
    if group.rank != 0:
        for view, tensor in zip(views, tensors, strict=True):
            tensor.copy_(view)


def _space_for(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Bytes for all tensors, and views of them."""
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(at, dtype=torch.uint8)
    views = [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    return memory, views
