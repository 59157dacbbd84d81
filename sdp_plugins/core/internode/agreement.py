"""Checks that all ranks call the same operation before any of its data moves.

The ranks of a node compare their calls through shared memory, and then the nodes' leaders exchange
headers, which describe a call in 44 bytes. The leaders all-gather their headers by Bruck's
algorithm with radix ``RADIX`` (Bruck et al. 1997). With R for the radix, a leader holds the headers
of its own node and of the R^i - 1 nodes before it when round i begins. It sends them to the nodes
that are R^i, 2 R^i, ..., (R - 1) R^i further, and receives as many from the nodes as far before it.
So up to R nodes exchange headers directly, in one round, and R^2 nodes in two.

A leader that has compared knows that all nodes have arrived and call the same operation, or raises.
"""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Collection, Iterable

from .. import _native
from ..errors import CollectiveMismatchError, SdpError
from .operation import SpanningOperation

RADIX = 16
_MOST_NAMED = 16
"""Most calls that an error lists, and most nodes that it names for each."""

_COMPARED = struct.calcsize("<QiiiiIQ")
_HEADER = struct.Struct("<QiiiiIQQ")
"""The fields that must be equal, and the number of elements, which may differ."""


def agree(operation: SpanningOperation) -> None:
    """Compare the calls of all ranks; the time-out starts when this node's ranks have arrived.

    Raises:
        CollectiveMismatchError: Ranks call different operations.
    """
    operation.deadlines.restart()
    operation.run_on_node(copy.copy(operation.request), compares_only=True)
    operation.deadlines.restart()  # the node's ranks have all arrived: they share a deadline
    if operation.context.is_node_leader:
        _compare(operation)


def await_leader(operation: SpanningOperation) -> None:
    """Hold this node's ranks until their leader knows that the other nodes agree.

    Programs call this first if ranks other than the leaders use the network.
    """
    if len(operation.context.local_ranks) > 1:
        operation.step(_native.Op.barrier, (), ())


def _compare(operation: SpanningOperation) -> None:
    """Exchange headers with the leaders of all other nodes, and compare them.

    Raises:
        CollectiveMismatchError: They differ.
    """
    size, nodes, node = _HEADER.size, operation.context.nodes, operation.context.node
    packed = _gathered(operation)
    if packed == packed[:size] * nodes.count:
        return
    headers = {
        (node - before) % nodes.count: packed[before * size : (before + 1) * size]
        for before in range(nodes.count)
    }
    parties: dict[bytes, list[int]] = {}
    for node, header in sorted(headers.items()):  # sizes in titles may differ
        parties.setdefault(header[:_COMPARED], []).append(node)
    if len(parties) > 1:
        raise _mismatch(operation, headers, list(parties.values()))


def _gathered(operation: SpanningOperation) -> bytes:
    """All-gather the headers; returns this node's, that of the node before it, and so on.

    The neighbours of a node that does not arrive wait in the first round. Other nodes may wait for
    these neighbours in a later round, so later rounds get one more grace period, as data does.
    """
    nodes, node, size = operation.context.nodes, operation.context.node, _HEADER.size

    def leader(distance: int) -> int:
        return nodes.members[(node + distance) % nodes.count][0]

    room = operation.context.scratch("headers", nodes.count * size)
    ctypes.memmove(room, _pack(operation), size)
    # Posted for all rounds at once: a node that is ahead need not wait for a slower one.
    arriving = [
        [operation.receive(leader(-at), room + at * size, n * size) for at, n in blocks]
        for blocks in rounds(nodes.count)
    ]
    for number, blocks in enumerate(rounds(nodes.count)):
        leaving = [operation.send(leader(distance), room, n * size) for distance, n in blocks]
        operation.wait(arriving[number] + leaving, hop=min(number, 1))
    return ctypes.string_at(room, nodes.count * size)


def _mismatch(
    operation: SpanningOperation, headers: dict[int, bytes], parties: list[list[int]]
) -> SdpError:
    """Compose the error for nodes that call different operations; those of a party agree."""
    context = operation.context
    nodes, global_ranks = context.nodes, context.global_ranks

    def ranks_on(party: Iterable[int]) -> list[int]:
        return [rank for node in party for rank in nodes.members[node]]

    words = "; ".join(
        f"{nodes.name(ranks_on(party[:_MOST_NAMED]))}{_more(party)}: "
        f"{_title(headers[party[0]], global_ranks)}"
        for party in parties[:_MOST_NAMED]
    )
    largest = max(parties, key=len)
    blamed = ranks_on(node for party in parties if party is not largest for node in party)
    return operation.error(CollectiveMismatchError, f"ranks disagree: {words}", blamed)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """The messages of each round: distance between sender and receiver, and number of headers."""
    found, held = [], 1
    while held < nodes:
        distances = range(held, min(RADIX * held, nodes), held)
        found.append([(distance, min(held, nodes - distance)) for distance in distances])
        held *= RADIX
    return found


def _more(nodes: Collection[int]) -> str:
    return f" and {len(nodes) - _MOST_NAMED} more nodes" if len(nodes) > _MOST_NAMED else ""


def _pack(operation: SpanningOperation) -> bytes:
    request = operation.request
    return _HEADER.pack(
        operation.seq,
        int(request.op),
        int(request.dtype) if request.op is not _native.Op.barrier else 0,
        int(request.reduce_op) if _native.reduces(request.op) else 0,
        request.root,
        request.layout,
        request.count if _native.counts_must_agree(request.op) else 0,
        request.count,
    )


def _title(header: bytes, global_ranks: list[int]) -> str:
    seq, op, dtype, reduce_op, root, layout, _, count = _HEADER.unpack(header)
    fields = (op, dtype, reduce_op, root, -1, 0, layout, count, seq)
    return _native.OpSignature.of(fields).title(global_ranks)
