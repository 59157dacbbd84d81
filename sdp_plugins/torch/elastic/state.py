"""Copies a rank's state, such as weights, to ranks that lack it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Group, elastic_state
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


def catch_up(
    group: Group,
    progress: Sequence[int],
    own_state: Callable[[], Any],
    load: Callable[[Any], None],
) -> bool:
    """Give the state of the rank that has come farthest to those that have not; a collective.

    Args:
        group: The ranks.
        progress: How far this rank has come, as for the core's ``catch_up``.
        own_state: Returns this rank's state; called on the rank that has come farthest.
        load: Takes it over; called on those that have not come so far.

    Returns:
        Whether this rank has taken over another one's state.
    """
    return elastic_state.catch_up(
        group,
        progress,
        lambda part: send(part, own_state(), 0),
        lambda part: load(receive(part, 0)),
    )


def seed_like(seed: int, steps: int, number: int) -> None:
    """Seed a rank that joins: as the others were, but with random numbers of its own.

    Args:
        seed: Of another rank.
        steps: How far the training has come.
        number: The rank's, in the job.
    """
    torch.manual_seed((seed + 7919 * steps + number) % 2**63)
