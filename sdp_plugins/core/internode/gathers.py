"""Collectives across nodes that only move elements.

Every rank's data is sent directly to the nodes that need it, once per node. Shared memory
distributes the data within the node. S: bytes of a rank's data, M: nodes, L: ranks of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from .. import _native
from ..errors import CollectiveMismatchError
from .agreement import await_leader
from .operation import Piece, SpanningOperation
from .transport import Pending

Op = _native.Op
NOTHING: Piece = (0, 0)


def all_gather(operation: SpanningOperation) -> None:
    """Run all_gather in one hop between nodes: each link carries LS(M-1) bytes per direction."""
    context, request = operation.context, operation.request
    nodes, source, recvs = context.nodes, request.sends[0], request.recvs
    counterparts = [nodes.counterpart(context.rank, node) for node in context.other_nodes]
    sources = [
        rank
        for rank in context.remote_ranks
        if nodes.counterpart(rank, context.node) == context.rank
    ]
    messages = _exchange(
        operation, dict.fromkeys(counterparts, source), {rank: recvs[rank] for rank in sources}
    )
    # While these messages are in flight, this node's ranks gather their own data.
    operation.step(Op.all_gather, [source], [recvs[rank] for rank in context.local_ranks])
    operation.wait(messages)
    for node in context.other_nodes:
        for ranks in rounds(nodes.members[node], len(context.local_ranks)):
            parts = [recvs[rank] for rank in ranks]
            parts += [NOTHING] * (len(context.local_ranks) - len(ranks))
            if len(context.local_ranks) > 1:
                operation.step(Op.all_gather, [parts[context.local_rank]], parts)


def gather(operation: SpanningOperation) -> None:
    """Run gather: the root's link receives S bytes from each rank of another node."""
    context, request = operation.context, operation.request
    root, mine, parts = request.root, request.sends[0], request.recvs
    if root not in context.local_ranks:
        operation.wait(_exchange(operation, {root: mine}, {}))
        return
    at_root = context.rank == root
    remote = context.remote_ranks if at_root else ()
    messages = _exchange(operation, {}, {rank: parts[rank] for rank in remote})
    local = [parts[rank] for rank in context.local_ranks] if at_root else []
    operation.step(Op.gather, [mine], local, root=context.nodes.index_of(root))
    operation.wait(messages)


def scatter(operation: SpanningOperation) -> None:
    """Run scatter: the root's link sends S bytes to each rank of another node."""
    context, request = operation.context, operation.request
    root, parts, mine = request.root, request.sends, request.recvs[0]
    if root not in context.local_ranks:
        operation.wait(_exchange(operation, {}, {root: mine}))
        return
    at_root = context.rank == root
    remote = context.remote_ranks if at_root else ()
    messages = _exchange(operation, {rank: parts[rank] for rank in remote}, {})
    local = [parts[rank] for rank in context.local_ranks] if at_root else []
    operation.step(Op.scatter, local, [mine], root=context.nodes.index_of(root))
    operation.wait(messages)


def all_to_all(operation: SpanningOperation) -> None:
    """Run all_to_all: each rank sends directly to each rank of another node."""
    context, sends, recvs = operation.context, operation.request.sends, operation.request.recvs
    messages = _exchange(
        operation,
        {rank: sends[rank] for rank in context.remote_ranks},
        {rank: recvs[rank] for rank in context.remote_ranks},
    )
    operation.step(
        Op.all_to_all,
        [sends[rank] for rank in context.local_ranks],
        [recvs[rank] for rank in context.local_ranks],
    )
    operation.wait(messages)


def rounds(ranks: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of a node in groups of at most `length`, this node's number of ranks."""
    for first in range(0, len(ranks), length):
        yield ranks[first : first + length]


def _exchange(
    operation: SpanningOperation, sends: Mapping[int, Piece], recvs: Mapping[int, Piece]
) -> list[Pending | None]:
    """Start the messages of this rank to and from ranks of other nodes, once their sizes agree.

    Raises:
        CollectiveMismatchError: A rank offers another number of elements; no element has moved.
    """
    await_leader(operation)
    _compare_sizes(operation, sends, recvs)
    size = operation.itemsize
    messages = [operation.receive(rank, at, n * size) for rank, (at, n) in recvs.items()]
    return messages + [operation.send(rank, at, n * size) for rank, (at, n) in sends.items()]


def _compare_sizes(
    operation: SpanningOperation, sends: Mapping[int, Piece], recvs: Mapping[int, Piece]
) -> None:
    offered = np.array([n for _, n in sends.values()], np.int64)
    found = np.zeros(len(recvs), np.int64)
    size = found.itemsize
    base, target = _native.address(offered), _native.address(found)
    messages = [operation.receive(peer, target + i * size, size) for i, peer in enumerate(recvs)]
    messages += [operation.send(peer, base + i * size, size) for i, peer in enumerate(sends)]
    operation.wait(messages)
    nodes, here = operation.context.nodes, operation.context.rank
    wrong = {
        peer: f"rank {nodes.global_rank(here)} expects {expected} elements of "
        f"rank {nodes.global_rank(peer)}, which offers {offer}"
        for (peer, (_, expected)), offer in zip(recvs.items(), found.tolist(), strict=True)
        if offer != expected
    }
    if wrong:
        text = "; ".join([*wrong.values()][:8])
        raise operation.error(CollectiveMismatchError, text, [here, *wrong])
