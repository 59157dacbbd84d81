"""Weights in memory that the ranks of a node share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.torch.sharding.layout import Layout


def like(parameter: Tensor, bucket: Tensor, start: int) -> Tensor:
    """Elements of a bucket, in the shape and the strides of a parameter."""
    at = bucket.storage_offset() + start
    return bucket.as_strided(parameter.size(), parameter.stride(), at)


def touch(layout: Layout, buckets: Sequence[Tensor], rank: int) -> None:
    """Write this rank's shards first, so that their pages lie in its NUMA node."""
    for bucket, elements in zip(layout.buckets, buckets, strict=True):
        first, last = bucket.shard(rank)
        elements[first:last].zero_()


def move_to_node(group: Group, layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Put rank 0's parameters into memory of which a node has one copy; a collective.

    Returns:
        The elements of each bucket.
    """
    memory = group.allocate_on_node(0 if group.local_rank else layout.nbytes)[0]
    buckets = [bucket.of(memory) for bucket in layout.buckets]
    touch(layout, buckets, group.rank)
    group.barrier()
    views: dict[int, Tensor] = {}
    with torch.no_grad():
        for bucket in layout.buckets:
            for slot in bucket.slots:
                elements = bucket.of_slot(memory, slot)
                views[slot.parameter] = like(parameters[slot.parameter], elements, 0)
        if group.rank == 0:
            for index, view in views.items():
                view.copy_(parameters[index])
    if group.local_size < group.world_size:
        for elements in buckets:
            group.broadcast(elements.view(torch.uint8), 0)
    group.barrier()
    for index, view in views.items():
        parameters[index].data = view
    return buckets
