"""Checks that ranks of different nodes expect the sizes that the others offer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError
from .operation import Operation


def compare_sizes(
    operation: Operation, offers: Mapping[int, int], expects: Mapping[int, int]
) -> None:
    """Exchange and compare sizes that may differ from rank to rank, before any element moves.

    Args:
        operation: The operation.
        offers: Number of elements that this rank sends to each rank of another node.
        expects: Number of elements that it expects from each.

    Raises:
        CollectiveMismatchError: A rank offers another number.
    """
    offered = np.array(list(offers.values()), np.int64)
    found = np.zeros(len(expects), np.int64)
    size = found.itemsize
    base, target = _native.address(offered), _native.address(found)
    messages = [operation.receive(peer, target + i * size, size) for i, peer in enumerate(expects)]
    messages += [operation.send(peer, base + i * size, size) for i, peer in enumerate(offers)]
    operation.wait(messages)
    nodes, here = operation.context.nodes, operation.context.rank
    wrong = [
        f"rank {nodes.global_rank(here)} expects {expected} elements of "
        f"rank {nodes.global_rank(peer)}, which offers {offer}"
        for (peer, expected), offer in zip(expects.items(), found.tolist(), strict=True)
        if offer != expected
    ]
    if wrong:
        blamed = [
            operation.context.rank,
            *(p for p, n in zip(expects, found, strict=True) if expects[p] != n),
        ]
        raise operation.error(CollectiveMismatchError, "; ".join(wrong[:8]), blamed)
