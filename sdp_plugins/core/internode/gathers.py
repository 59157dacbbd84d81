"""Collectives across nodes that only move elements.

Every rank's data goes straight to where it is needed, once per node, and is spread there through
shared memory. S: bytes of a rank's data, M: nodes, L: ranks of a node.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import _native
from .call import Call, Piece
from .sizes import compare_sizes

Op = _native.Op
NOTHING: Piece = (0, 0)


def all_gather(call: Call) -> None:
    """One hop between nodes: each link carries LS(M-1) bytes per direction."""
    here, request = call.here, call.request
    nodes, source, recvs = here.nodes, request.sends[0], request.recvs
    call.begin()
    keepers = [nodes.keeper(here.rank, node) for node in here.others]
    kept = [
        rank
        for node in here.others
        for rank in nodes.members[node]
        if nodes.keeper(rank, here.node) == here.rank
    ]
    compare_sizes(
        call,
        offers=dict.fromkeys(keepers, source[1]),
        expects={rank: recvs[rank][1] for rank in kept},
    )
    messages = [call.receive(rank, *_bytes(call, recvs[rank])) for rank in kept]
    messages += [call.send(peer, *_bytes(call, source)) for peer in keepers]
    # While they are on their way: what this node's own ranks have.
    call.step(Op.all_gather, [source], [recvs[rank] for rank in here.local])
    call.wait(messages)
    for node in here.others:
        for ranks in rounds(nodes.members[node], len(here.local)):
            parts = [recvs[rank] for rank in ranks]
            parts += [NOTHING] * (len(here.local) - len(ranks))
            if len(here.local) > 1:
                call.step(Op.all_gather, [parts[here.index]], parts)


def gather(call: Call) -> None:
    """Everyone sends to the root: its link takes S times the number of ranks elsewhere."""
    here, request = call.here, call.request
    nodes, root = here.nodes, request.root
    call.begin()
    if here.node != nodes.node_of(root):
        compare_sizes(call, offers={root: request.sends[0][1]}, expects={})
        call.wait([call.send(root, *_bytes(call, request.sends[0]))])
        return
    messages = []
    at_root = here.rank == root
    if at_root:
        remote = [rank for node in here.others for rank in nodes.members[node]]
        expected = {rank: request.recvs[rank][1] for rank in remote}
        compare_sizes(call, offers={}, expects=expected)
        messages = [call.receive(rank, *_bytes(call, request.recvs[rank])) for rank in remote]
    recvs = [request.recvs[rank] for rank in here.local] if at_root else []
    call.step(Op.gather, request.sends, recvs, root=nodes.index_of(root))
    call.wait(messages)


def scatter(call: Call) -> None:
    """The root sends to everyone: its link gives S times the number of ranks elsewhere."""
    here, request = call.here, call.request
    nodes, root = here.nodes, request.root
    call.begin()
    if here.node != nodes.node_of(root):
        compare_sizes(call, offers={}, expects={root: request.recvs[0][1]})
        call.wait([call.receive(root, *_bytes(call, request.recvs[0]))])
        return
    messages = []
    at_root = here.rank == root
    if at_root:
        remote = [rank for node in here.others for rank in nodes.members[node]]
        compare_sizes(call, offers={rank: request.sends[rank][1] for rank in remote}, expects={})
        messages = [call.send(rank, *_bytes(call, request.sends[rank])) for rank in remote]
    sends = [request.sends[rank] for rank in here.local] if at_root else []
    call.step(Op.scatter, sends, request.recvs, root=nodes.index_of(root))
    call.wait(messages)


def all_to_all(call: Call) -> None:
    """Everyone sends to everyone on other nodes: each link carries what has to cross it."""
    here, request = call.here, call.request
    nodes = here.nodes
    call.begin()
    remote = [rank for node in here.others for rank in nodes.members[node]]
    compare_sizes(
        call,
        offers={rank: request.sends[rank][1] for rank in remote},
        expects={rank: request.recvs[rank][1] for rank in remote},
    )
    messages = [call.receive(rank, *_bytes(call, request.recvs[rank])) for rank in remote]
    messages += [call.send(rank, *_bytes(call, request.sends[rank])) for rank in remote]
    call.step(
        Op.all_to_all,
        [request.sends[rank] for rank in here.local],
        [request.recvs[rank] for rank in here.local],
    )
    call.wait(messages)


def _bytes(call: Call, piece: Piece) -> tuple[int, int]:
    return piece[0], piece[1] * call.itemsize


def rounds(ranks: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
    """Ranks of another node, as many at a time as this one has."""
    for first in range(0, len(ranks), length):
        yield ranks[first : first + length]
