"""Copies a rank's state, such as weights, to ranks that lack it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.torch.tensors import to_move


def send(group: Group, state: Any, root: int) -> None:
    """Send a state to all other ranks of a group; a collective, of which they call ``receive``.

    Tensors travel as they are, one after the other, and the rest by pickle.

    Args:
        group: The ranks.
        state: Anything that can be pickled.
        root: This rank.
    """
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.layout is torch.strided):
                return None
            tensors.append(value.detach())
            return len(tensors) - 1, value.dtype, tuple(value.shape), value.requires_grad

    file = io.BytesIO()
    Pickler(file).dump(state)
    rest = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    for tensor in (torch.tensor([rest.numel()]), rest, *tensors):
        if tensor.numel():
            group.broadcast(to_move(tensor.cpu().contiguous()), root)


def receive(group: Group, root: int) -> Any:
    """Receive the state that the root sends.

    Args:
        group: The ranks.
        root: The one that sends.

    Returns:
        The state; its tensors are on the CPU.
    """
    size = torch.zeros(1, dtype=torch.int64)
    group.broadcast(to_move(size), root)
    rest = torch.empty(int(size.item()), dtype=torch.uint8)
    group.broadcast(to_move(rest), root)
    tensors: list[Tensor] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, described: Any) -> Any:
            index, dtype, shape, requires_grad = described
            assert index == len(tensors)
            tensors.append(torch.empty(shape, dtype=dtype))
            return tensors[-1].requires_grad_(requires_grad)

    state = Unpickler(io.BytesIO(rest.numpy().tobytes())).load()
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(to_move(tensor.detach()), root)
    return state
