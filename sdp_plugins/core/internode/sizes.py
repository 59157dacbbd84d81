"""Whether what ranks of different nodes expect of each other is what these offer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError
from .call import Call


def compare_sizes(call: Call, offers: Mapping[int, int], expects: Mapping[int, int]) -> None:
    """Swap sizes, where they may differ from rank to rank, before any element is moved.

    Args:
        call: The operation.
        offers: Elements that this rank has for each rank of another node.
        expects: Elements that it expects of each.

    Raises:
        CollectiveMismatchError: Something else is offered.
    """
    offered = np.array(list(offers.values()), np.int64)
    found = np.zeros(len(expects), np.int64)
    size = found.itemsize
    base, target = _native.address(offered), _native.address(found)
    messages = [call.receive(peer, target + i * size, size) for i, peer in enumerate(expects)]
    messages += [call.send(peer, base + i * size, size) for i, peer in enumerate(offers)]
    call.wait(messages)
    number = call.here.nodes.number
    wrong = [
        f"rank {number(call.here.rank)} expects {expected} elements of rank {number(peer)}, which "
        f"offers {offer}"
        for (peer, expected), offer in zip(expects.items(), found.tolist(), strict=True)
        if offer != expected
    ]
    if wrong:
        blamed = [
            call.here.rank,
            *(p for p, n in zip(expects, found, strict=True) if expects[p] != n),
        ]
        raise call.error(CollectiveMismatchError, "; ".join(wrong[:8]), blamed)
