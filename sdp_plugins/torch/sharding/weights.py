"""Weights in memory that the ranks of a node share."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from sdp_plugins.core import Group, SdpError, _native
from sdp_plugins.torch.sharding.layout import Bucket, Layout


def like(parameter: Tensor, bucket: Tensor, start: int) -> Tensor:
    """Elements of a bucket, in the shape and the strides of a parameter."""
    at = bucket.storage_offset() + start
    return bucket.as_strided(parameter.size(), parameter.stride(), at)


def touch(layout: Layout, buckets: Sequence[Tensor], rank: int) -> None:
    """Write this rank's shards first, so that their pages lie in its NUMA node."""
    for bucket, elements in zip(layout.buckets, buckets, strict=True):
        first, last = bucket.shard(rank)
        elements[first:last].zero_()


@cache
def can_tell_writes() -> bool:
    """Whether the kernel tells which pages a process has written; a sandbox may hide that."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    page[0] = 1
    address = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
    try:
        return _native.written_pages(address, len(page)) == [(0, len(page))]
    except SdpError:
        return False


class NodeWeights:
    """Tensors of which a node has one copy; making it is a collective.

    The program goes on to use the tensors, whose data is now this rank's view of the copy. What the
    program writes there, other ranks do not see: `take` puts this rank's shards of it into the
    copy, where optimizers write, too.

    Args:
        group: All ranks; they begin with rank 0's values.
        layout: Of the tensors.
        tensors: Those of the layout's parameters.

    Attributes:
        buckets: The elements of each bucket.
        views: The same, as the program sees them on this rank.
    """

    def __init__(self, group: Group, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self._layout, self._rank = layout, group.rank
        memory, view = group.allocate_with_view(layout.nbytes)
        self.buckets = [bucket.of(memory) for bucket in layout.buckets]
        self.views = [bucket.of(view) for bucket in layout.buckets]
        touch(layout, self.buckets, group.rank)
        group.barrier()
        with torch.no_grad():
            if group.rank == 0:
                for bucket, elements in zip(layout.buckets, self.buckets, strict=True):
                    for slot in bucket.slots:
                        tensor = tensors[slot.parameter]
                        like(tensor, elements, slot.start).copy_(tensor)
        if group.local_size < group.world_size:
            for elements in self.buckets:
                group.broadcast(elements.view(torch.uint8), 0)
        group.barrier()
        for bucket in layout.buckets:
            for slot in bucket.slots:
                tensor = tensors[slot.parameter]
                tensor.data = like(tensor, bucket.of_slot(view, slot), 0)
        self._memory, self._view = (torch.frombuffer(m, dtype=torch.uint8) for m in (memory, view))
        self.changed()  # fails here if the kernel does not tell

    def changed(self) -> set[int]:
        """The parameters whose values the program has changed since the last `take`."""
        self._written = _native.written_pages(self._view.data_ptr(), self._view.nbytes)
        return {
            slot.parameter
            for bucket, first, last in self._written_parts()
            for slot in bucket.slots
            for start, stop in [_bytes(bucket, slot.start, slot.stop, first, last)]
            if not torch.equal(self._memory[start:stop], self._view[start:stop])
        }

    def take(self) -> None:
        """Put what `changed` has found into the copy; all ranks read it there from now on."""
        for bucket, first, last in self._written_parts():
            start, stop = _bytes(bucket, *bucket.shard(self._rank), first, last)
            self._memory[start:stop] = self._view[start:stop]
        for first, last in self._written:
            _native.drop_pages(self._view.data_ptr() + first, last - first)
        self._written = []

    def _written_parts(self) -> Iterator[tuple[Bucket, int, int]]:
        for first, last in self._written:
            for bucket in self._layout.buckets:
                yield bucket, first, last


def _bytes(bucket: Bucket, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """The bytes of elements of a bucket, as far as they are from `first` to `last`."""
    size = bucket.dtype.itemsize
    begin = max(bucket.offset + start * size, first)
    return begin, max(begin, min(bucket.offset + stop * size, last))
