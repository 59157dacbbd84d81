"""Where parameters lie in buckets, and which parts of them a rank updates.

Parameters enter buckets in the order in which the backward pass yields their gradients. Every rank
updates an equal part of every bucket, or whole parameters, of about equally many elements.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes from which parameters and shards begin.

No two ranks write into one cache line. And torch's kernels, some of which round the last elements
of a tensor otherwise, find the same last elements in a parameter and in its pieces.
"""
PIECE_NBYTES = 2 * 2**20  # optimizers that make several passes find a piece in a cache again


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket.

    Attributes:
        parameter: Its index in the optimizer's parameters.
        group: Its parameter group.
        start: Its first element.
        stop: The one after its last.
    """

    parameter: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one data type that are reduced together.

    Attributes:
        dtype: Of the elements.
        offset: First byte in the memory of all buckets.
        bounds: The first element of what each rank updates, and the number of elements with
            padding.
        slots: In the order of their places.
    """

    dtype: torch.dtype
    offset: int
    bounds: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.bounds[-1]

    @property
    def is_even(self) -> bool:
        """Whether all ranks update equally many elements."""
        return len({last - first for first, last in pairwise(self.bounds)}) == 1

    def shard(self, rank: int) -> tuple[int, int]:
        """First element of what a rank updates, and the one after the last."""
        return self.bounds[rank], self.bounds[rank + 1]

    def of(self, memory: memoryview) -> Tensor:
        """The bucket's elements in the memory of all buckets."""
        return self._elements(memory, 0, self.numel)

    def of_slot(self, memory: memoryview, slot: Slot) -> Tensor:
        """A parameter's elements there: a storage of its own, which can be saved by itself."""
        return self._elements(memory, slot.start, slot.stop)

    def _elements(self, memory: memoryview, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        offset = self.offset + start * self.dtype.itemsize
        return torch.frombuffer(memory, dtype=self.dtype, count=stop - start, offset=offset)


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that a rank updates.

    Attributes:
        bucket: Index of the bucket.
        slot: The parameter's place.
        start: First element in the bucket.
        stop: The one after the last.
    """

    bucket: int
    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """All buckets, equal on all ranks.

    Attributes:
        buckets: In the order in which they fill.
        by_parameter: Whether each parameter is updated by one rank.
    """

    buckets: tuple[Bucket, ...]
    by_parameter: bool

    @property
    def nbytes(self) -> int:
        """Size of the memory of all buckets."""
        if not self.buckets:
            return 0
        last = self.buckets[-1]
        return last.offset + last.numel * last.dtype.itemsize

    def parts(self, rank: int) -> list[Piece]:
        """What a rank updates of each parameter, perhaps nothing."""
        return [
            Piece(index, slot, *(min(max(at, slot.start), slot.stop) for at in bucket.shard(rank)))
            for index, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]

    def pieces(self, rank: int) -> list[Piece]:
        """What a rank updates: parameters, or pieces of them of at most `PIECE_NBYTES`."""
        found = []
        for part in self.parts(rank):
            itemsize = self.buckets[part.bucket].dtype.itemsize
            most = sys.maxsize if self.by_parameter else PIECE_NBYTES // itemsize
            for at in range(part.start, part.stop, most):
                found.append(replace(part, start=at, stop=min(at + most, part.stop)))
        return found


def lay_out(
    parameters: Sequence[Tensor],
    groups: Sequence[int],
    world_size: int,
    bucket_bytes: int,
    by_parameter: bool = False,
) -> Layout:
    """Divide the parameters that require a gradient into buckets.

    Args:
        parameters: In the order of their definition.
        groups: The parameter group of each.
        world_size: Number of ranks.
        bucket_bytes: Size from which a bucket takes no other parameter.
        by_parameter: Whether ranks update whole parameters.
    """
    filling: dict[torch.dtype, list[int]] = {}
    nbytes: Counter[torch.dtype] = Counter()  # of what is filling
    full: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if not parameter.requires_grad:
            continue
        dtype = parameter.dtype
        members = filling.setdefault(dtype, [])
        if members and nbytes[dtype] + parameter.nbytes > bucket_bytes:
            full.append(members)
            members, nbytes[dtype] = [], 0
            filling[dtype] = members
        members.append(index)
        nbytes[dtype] += parameter.nbytes
    owners = _owners(parameters, world_size) if by_parameter else None
    buckets: list[Bucket] = []
    offset = 0
    for indices in (*full, *filling.values()):
        if owners:
            indices.sort(key=owners.__getitem__)
        slots, numel = _slots([(parameters[i], i, groups[i]) for i in indices])
        dtype = parameters[indices[0]].dtype
        if owners:
            bounds = _bounds([owners[index] for index in indices], slots, numel, world_size)
        else:
            unit = ALIGNMENT // dtype.itemsize
            size = -(-numel // (unit * world_size)) * unit
            bounds = tuple(rank * size for rank in range(world_size + 1))
        buckets.append(Bucket(dtype, offset, bounds, slots))
        offset += bounds[-1] * dtype.itemsize
    return Layout(tuple(buckets), by_parameter)


def _owners(parameters: Sequence[Tensor], world_size: int) -> dict[int, int]:
    """The rank that updates each parameter: the largest first, each to who has the least."""
    indices = (i for i, parameter in enumerate(parameters) if parameter.requires_grad)
    loads = [0] * world_size
    owners = {}
    for index in sorted(indices, key=lambda i: parameters[i].numel(), reverse=True):
        owners[index] = rank = loads.index(min(loads))
        loads[rank] += parameters[index].numel()
    return owners


def _bounds(
    owners: Sequence[int], slots: Sequence[Slot], numel: int, world_size: int
) -> tuple[int, ...]:
    """Where each rank's parameters begin, and their end."""
    starts = [*(slot.start for slot in slots), numel]
    return tuple(starts[bisect_left(owners, rank)] for rank in range(world_size + 1))


def _slots(members: Sequence[tuple[Tensor, int, int]]) -> tuple[tuple[Slot, ...], int]:
    """Places for parameters, and the number of elements that they need."""
    unit = ALIGNMENT // members[0][0].dtype.itemsize
    slots, at = [], 0
    for parameter, index, group in members:
        slots.append(Slot(index, group, at, at + parameter.numel()))
        at += -(-parameter.numel() // unit) * unit
    return tuple(slots), at
