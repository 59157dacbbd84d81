"""broadcast across nodes."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _native
from .agreement import await_leader
from .operation import SpanningOperation
from .transport import Pending

SEGMENT_NBYTES = 2**20
CHAIN_NBYTES = 256 * 1024
"""Smallest buffer for a chain: from this size on bandwidth counts more than latency."""
AHEAD = 4
Op = _native.Op


@dataclass(frozen=True)
class Route:
    """The neighbours of a node in a broadcast, as indices of nodes."""

    parent: int | None
    children: tuple[int, ...]


def route(node: int, root: int, nodes: int, *, chain: bool) -> Route:
    """Return a node's parent and children in a broadcast from `root`.

    A chain sends every byte over each link once, in `nodes` - 1 hops. A binomial tree takes
    log2(nodes) hops, and the root sends in each of them.
    """
    at = (node - root) % nodes
    if chain:
        parent, children = at - 1, [at + 1] if at + 1 < nodes else []
    else:
        low = at & -at if at else 1 << (nodes - 1).bit_length()
        parent = at - low
        steps = [1 << bit for bit in reversed(range(low.bit_length() - 1))]
        children = [at + step for step in steps if at + step < nodes]
    to_node = [(child + root) % nodes for child in children]
    return Route((parent + root) % nodes if at else None, tuple(to_node))


def broadcast(operation: SpanningOperation) -> None:
    """Run broadcast: in segments along a chain of nodes, or over a tree if the buffer is small.

    Each link of a chain carries the S bytes of the buffer once.
    """
    context, request = operation.context, operation.request
    nodes, root = context.nodes, request.root
    address, count = request.recvs[0]
    await_leader(operation)
    nbytes = count * operation.itemsize
    if nbytes == 0:
        return
    via = route(context.node, nodes.node_of(root), nodes.count, chain=nbytes >= CHAIN_NBYTES)
    counterpart = nodes.counterpart(root, context.node)
    carries = context.rank == counterpart
    length = SEGMENT_NBYTES // operation.itemsize
    segments = [(begin, min(length, count - begin)) for begin in range(0, count, length)]
    arriving: list[Pending | None] = []
    leaving: list[Pending | None] = []
    for k, (begin, n) in enumerate(segments):
        at = address + begin * operation.itemsize
        if carries and via.parent is not None:
            parent = nodes.counterpart(root, via.parent)
            for first, m in segments[len(arriving) : k + AHEAD]:
                place = address + first * operation.itemsize
                arriving.append(operation.receive(parent, place, m * operation.itemsize))
            operation.wait([arriving[k]])
        if carries:
            for child in via.children:
                leaving.append(
                    operation.send(nodes.counterpart(root, child), at, n * operation.itemsize)
                )
        if len(context.local_ranks) > 1:
            operation.step(Op.broadcast, (), [(at, n)], root=nodes.index_of(counterpart))
    operation.wait(leaving)
