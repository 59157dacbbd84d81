"""broadcast and barrier across nodes."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _native
from .call import Call
from .wire import Pending

SEGMENT_NBYTES = 2**20
CHAIN_NBYTES = 256 * 1024
"""From here on bandwidth counts more than latency."""
AHEAD = 4
Op = _native.Op


@dataclass(frozen=True)
class Route:
    """Where a node's copy comes from and goes to, as indices of nodes."""

    parent: int | None
    children: tuple[int, ...]


def route(node: int, root: int, nodes: int, *, chain: bool) -> Route:
    """Place a node in a broadcast from `root`.

    A chain sends every byte over each link once, in `nodes` - 1 hops; a binomial tree takes
    log2(nodes) hops, of which the root sends all.
    """
    at = (node - root) % nodes
    if chain:
        parent, children = at - 1, [at + 1] if at + 1 < nodes else []
    else:
        low = at & -at if at else 1 << (nodes - 1).bit_length()
        parent = at - low
        children = [at + step for step in _halves(low) if at + step < nodes]
    to_node = [(child + root) % nodes for child in children]
    return Route((parent + root) % nodes if at else None, tuple(to_node))


def _halves(low: int) -> list[int]:
    steps = []
    while low > 1:
        low //= 2
        steps.append(low)
    return steps


def broadcast(call: Call) -> None:
    """Along a chain of nodes in segments, or a tree if it is small; S bytes over each link."""
    here, request = call.here, call.request
    nodes, root = here.nodes, request.root
    address, count = request.recvs[0]
    call.begin()
    nbytes = count * call.itemsize
    if nbytes == 0:
        return
    via = route(here.node, nodes.node_of(root), nodes.count, chain=nbytes >= CHAIN_NBYTES)
    keeper = nodes.keeper(root, here.node)
    carries = here.rank == keeper
    length = SEGMENT_NBYTES // call.itemsize
    segments = [(begin, min(length, count - begin)) for begin in range(0, count, length)]
    arriving: list[Pending | None] = []
    leaving: list[Pending | None] = []
    for k, (begin, n) in enumerate(segments):
        at = address + begin * call.itemsize
        if carries and via.parent is not None:
            parent = nodes.keeper(root, via.parent)
            for first, m in segments[len(arriving) : k + AHEAD]:
                place = address + first * call.itemsize
                arriving.append(call.receive(parent, place, m * call.itemsize))
            call.wait([arriving[k]])
        if carries:
            for child in via.children:
                leaving.append(call.send(nodes.keeper(root, child), at, n * call.itemsize))
        if len(here.local) > 1:
            call.step(Op.broadcast, (), [(at, n)], root=nodes.index_of(keeper))
    call.wait(leaving)


def barrier(call: Call) -> None:
    """Who has compared what the nodes call knows that all have come."""
    call.begin(gate=False)
    if len(call.here.local) > 1:
        call.step(Op.barrier, (), ())
