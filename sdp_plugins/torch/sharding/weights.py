"""Weights in memory that the ranks of a node share."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from sdp_plugins.core import Group, SdpError, _native
from sdp_plugins.torch.sharding.layout import Bucket, Layout

JOINED_NBYTES = 2**20
"""Written pages that are nearer to each other are handled together."""


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
    """Whether views work here: a sandbox may hide what was written, and locked memory is copied."""
    page = mmap.PAGESIZE
    file = os.memfd_create("sdp-probe")
    try:
        os.ftruncate(file, 2 * page)
        memory = mmap.mmap(file, 2 * page)
        view = mmap.mmap(file, 2 * page, mmap.MAP_PRIVATE)
    finally:
        os.close(file)
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    memory[0] = memory[page] = 1
    try:
        shown = view[0], view[page]
        view[page] = 2
        written = _native.written_pages(address, 2 * page)
        _native.drop_pages(address + page, page)
    except SdpError:
        return False
    return shown == (1, 1) and written == [(page, 2 * page)] and view[page] == 1


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
        if not can_tell_writes():
            raise SdpError(
                f"{group.error_prefix}Linux does not tell here which memory a process has written. "
                "Hint: give processes /proc/self/pagemap, and do not lock memory by mlockall()."
            )
        self._layout, self._rank, self._tensors = layout, group.rank, tensors
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
        self._written: list[tuple[int, int]] = []
        _give_back_freed()

    def changed(self) -> dict[int, int]:
        """The parameters that the program has changed since the last `take`: digests of them."""
        pages = _native.written_pages(self._view.data_ptr(), self._view.nbytes)
        self._written = _joined(pages)
        found: dict[int, int] = {}
        for bucket, first, last in self._written_parts():
            for slot in bucket.slots:
                start, stop = _bytes(bucket, slot.start, slot.stop, first, last)
                if start == stop or slot.parameter in found:
                    continue
                if not torch.equal(self._memory[start:stop], self._view[start:stop]):
                    whole = slice(*_bytes(bucket, slot.start, slot.stop, 0, sys.maxsize))
                    found[slot.parameter] = zlib.crc32(self._view[whole].numpy().data) or 1
        return found

    def take(self) -> None:
        """Put what `changed` has found into the copy; all ranks read it there from now on."""
        for bucket, first, last in self._written_parts():
            start, stop = _bytes(bucket, *bucket.shard(self._rank), first, last)
            self._memory[start:stop] = self._view[start:stop]
        for first, last in self._written:
            _native.drop_pages(self._view.data_ptr() + first, last - first)
        self._written = []

    def leave_tensors(self) -> None:
        """Give this rank's tensors memory of their own."""
        for bucket in self._layout.buckets:
            for slot in bucket.slots:
                tensor = self._tensors[slot.parameter]
                tensor.data = tensor.data.clone()

    def tell_autograd(self, unchanged: Collection[int]) -> None:
        """Have backward passes of graphs from before an update fail, as after any in-place one."""
        slots = [slot.parameter for bucket in self._layout.buckets for slot in bucket.slots]
        updated = [self._tensors[index] for index in slots if index not in unchanged]
        torch.autograd.graph.increment_version(updated)

    def _written_parts(self) -> Iterator[tuple[Bucket, int, int]]:
        for first, last in self._written:
            for bucket in self._layout.buckets:
                yield bucket, first, last


def _give_back_freed() -> None:
    """Give memory that this process has freed, as that of the tensors' values, to the others."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _joined(pages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Few ranges with all of these pages; pages between them show the copy, and may be taken."""
    joined: list[tuple[int, int]] = []
    for first, last in pages:
        if joined and first - joined[-1][1] < JOINED_NBYTES:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return joined


def _bytes(bucket: Bucket, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """The bytes of elements of a bucket, as far as they are from `first` to `last`."""
    size = bucket.dtype.itemsize
    begin = max(bucket.offset + start * size, first)
    return begin, max(begin, min(bucket.offset + stop * size, last))
