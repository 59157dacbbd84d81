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
from .operation import Operation, Piece

Op = _native.Op
NOTHING: Piece = (0, 0)


def all_gather(operation: Operation) -> None:
    """Run all_gather in one hop between nodes: each link carries LS(M-1) bytes per direction."""
    context, request = operation.context, operation.request
    nodes, source, recvs = context.nodes, request.sends[0], request.recvs
    await_leader(operation)
    counterparts = [nodes.counterpart(context.rank, node) for node in context.other_nodes]
    sources = [
        rank
        for node in context.other_nodes
        for rank in nodes.members[node]
        if nodes.counterpart(rank, context.node) == context.rank
    ]
    compare_sizes(
        operation,
        offers=dict.fromkeys(counterparts, source[1]),
        expects={rank: recvs[rank][1] for rank in sources},
    )
    messages = [operation.receive(rank, *_bytes(operation, recvs[rank])) for rank in sources]
    messages += [operation.send(peer, *_bytes(operation, source)) for peer in counterparts]
    # While these messages are in flight, this node's ranks gather their own data.
    operation.step(Op.all_gather, [source], [recvs[rank] for rank in context.local_ranks])
    operation.wait(messages)
    for node in context.other_nodes:
        for ranks in rounds(nodes.members[node], len(context.local_ranks)):
            parts = [recvs[rank] for rank in ranks]
            parts += [NOTHING] * (len(context.local_ranks) - len(ranks))
            if len(context.local_ranks) > 1:
                operation.step(Op.all_gather, [parts[context.local_rank]], parts)


def gather(operation: Operation) -> None:
    """Run gather: the root's link receives S bytes from each rank of another node."""
    context, request = operation.context, operation.request
    nodes, root, sends, recvs = context.nodes, request.root, request.sends, request.recvs
    await_leader(operation)
    if context.node != nodes.node_of(root):
        compare_sizes(operation, offers={root: sends[0][1]}, expects={})
        operation.wait([operation.send(root, *_bytes(operation, sends[0]))])
        return
    messages = []
    at_root = context.rank == root
    if at_root:
        remote = [rank for node in context.other_nodes for rank in nodes.members[node]]
        expected = {rank: recvs[rank][1] for rank in remote}
        compare_sizes(operation, offers={}, expects=expected)
        messages = [operation.receive(rank, *_bytes(operation, recvs[rank])) for rank in remote]
    parts = [recvs[rank] for rank in context.local_ranks] if at_root else []
    operation.step(Op.gather, sends, parts, root=nodes.index_of(root))
    operation.wait(messages)


def scatter(operation: Operation) -> None:
    """Run scatter: the root's link sends S bytes to each rank of another node."""
    context, request = operation.context, operation.request
    nodes, root, sends, recvs = context.nodes, request.root, request.sends, request.recvs
    await_leader(operation)
    if context.node != nodes.node_of(root):
        compare_sizes(operation, offers={}, expects={root: recvs[0][1]})
        operation.wait([operation.receive(root, *_bytes(operation, recvs[0]))])
        return
    messages = []
    at_root = context.rank == root
    if at_root:
        remote = [rank for node in context.other_nodes for rank in nodes.members[node]]
        compare_sizes(operation, offers={rank: sends[rank][1] for rank in remote}, expects={})
        messages = [operation.send(rank, *_bytes(operation, sends[rank])) for rank in remote]
    parts = [sends[rank] for rank in context.local_ranks] if at_root else []
    operation.step(Op.scatter, parts, recvs, root=nodes.index_of(root))
    operation.wait(messages)


def all_to_all(operation: Operation) -> None:
    """Run all_to_all: each rank sends directly to each rank of another node."""
    context, request = operation.context, operation.request
    nodes, sends, recvs = context.nodes, request.sends, request.recvs
    await_leader(operation)
    remote = [rank for node in context.other_nodes for rank in nodes.members[node]]
    compare_sizes(
        operation,
        offers={rank: sends[rank][1] for rank in remote},
        expects={rank: recvs[rank][1] for rank in remote},
    )
    messages = [operation.receive(rank, *_bytes(operation, recvs[rank])) for rank in remote]
    messages += [operation.send(rank, *_bytes(operation, sends[rank])) for rank in remote]
    operation.step(
        Op.all_to_all,
        [sends[rank] for rank in context.local_ranks],
        [recvs[rank] for rank in context.local_ranks],
    )
    operation.wait(messages)


def _bytes(operation: Operation, piece: Piece) -> tuple[int, int]:
    return piece[0], piece[1] * operation.itemsize


def rounds(ranks: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of a node in groups of at most `length`, this node's number of ranks."""
    for first in range(0, len(ranks), length):
        yield ranks[first : first + length]


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
