"""Whether what ranks of different nodes expect of each other is what these offer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError
from .operation import Operation


def compare_sizes(
    operation: Operation, offers: Mapping[int, int], expects: Mapping[int, int]
) -> None:
    """Exchange sizes, where they may differ from rank to rank, before any element is moved.

    Args:
        operation: The operation.
        offers: Elements that this rank has for each rank of another node.
        expects: Elements that it expects of each.

    Raises:
        CollectiveMismatchError: Something else is offered.
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
