"""The headers that the nodes' leaders exchange before an operation's data moves.

A header describes a call in 44 bytes. The leaders all-gather their headers by Bruck's algorithm
with radix ``RADIX`` (Bruck et al. 1997). With R for the radix, a leader holds the headers of its
own node and of the R^i - 1 nodes before it when round i begins. It sends them to the nodes that are
R^i, 2 R^i, ..., (R - 1) R^i further, and receives as many from the nodes as far before it. So up to
R nodes exchange headers directly, in one round, and R^2 nodes in two.

A leader that has compared knows that all nodes have arrived and call the same operation, or raises.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable

from .. import _native
from ..errors import CollectiveMismatchError
from .operation import Operation
from .transport import Pending, Stream

RADIX = 16
_MOST_NAMED = 16
"""Most calls that an error lists, and most nodes that it names for each."""

_COMPARED = struct.calcsize("<QiiiiIQ")
_HEADER = struct.Struct("<QiiiiIQQ")
"""The fields that must be equal, and the number of elements, which may differ."""


class Headers:
    """The headers of one operation; the messages start with the constructor.

    Args:
        operation: The operation.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        nodes, size = operation.context.nodes.count, _HEADER.size
        # The n-th header here is that of the n-th node before this one.
        self._room = _room(operation, nodes * size)
        self._rounds = rounds(nodes)
        ctypes.memmove(self._room, _pack(operation), size)
        # Posted for all rounds at once: a node that is ahead need not wait for a slower one.
        self._messages: list[list[Pending | None]] = [
            [
                operation.receive(
                    self._leader(-distance), self._room + distance * size, n * size, Stream.headers
                )
                for distance, n in blocks
            ]
            for blocks in self._rounds
        ]
        self._send(0)

    def _send(self, number: int) -> None:
        self._messages[number] += [
            self._operation.send(
                self._leader(distance), self._room, n * _HEADER.size, Stream.headers
            )
            for distance, n in self._rounds[number]
        ]

    def arrived(self) -> bool:
        """Whether all headers are known to have arrived and to agree; never with two rounds."""
        one_round = len(self._rounds) == 1
        done = one_round and self._operation.done(self._messages[0], Stream.headers)
        return done and len(self._parties()) == 1

    def compare(self) -> None:
        """Wait for all headers and compare them.

        The neighbours of a node that does not arrive wait in the first round. Other nodes may wait
        for these neighbours in a later round, so later rounds get one more grace period, as
        data does.

        Raises:
            CollectiveMismatchError: They differ.
        """
        for number, messages in enumerate(self._messages):
            if number > 0:
                self._send(number)
            self._operation.wait(messages, Stream.headers, hop=min(number, 1))
        parties = self._parties()
        if len(parties) > 1:
            self._disagree(parties)

    def _read(self) -> dict[int, bytes]:
        """All headers by node, once they have arrived."""
        context, size = self._operation.context, _HEADER.size
        return {
            (context.node - before) % context.nodes.count: ctypes.string_at(
                self._room + before * size, size
            )
            for before in range(context.nodes.count)
        }

    def _parties(self) -> list[dict[int, bytes]]:
        """The headers by node, of the nodes that agree with each other; the lowest node first."""
        parties: dict[bytes, dict[int, bytes]] = {}
        for node, header in sorted(self._read().items()):  # sizes in titles may differ
            parties.setdefault(header[:_COMPARED], {})[node] = header
        return list(parties.values())

    def _disagree(self, parties: list[dict[int, bytes]]) -> None:
        operation, nodes = self._operation, self._operation.context.nodes
        ranks = operation.context.global_ranks
        words = "; ".join(
            f"{nodes.name(self._ranks_on([*party][:_MOST_NAMED]))}{_more(party)}: "
            f"{_title(party[min(party)], ranks)}"
            for party in parties[:_MOST_NAMED]
        )
        largest = max(parties, key=len)
        blamed = [node for party in parties if party is not largest for node in party]
        raise operation.error(
            CollectiveMismatchError, f"ranks disagree: {words}", self._ranks_on(blamed)
        )

    def _ranks_on(self, nodes: Iterable[int]) -> list[int]:
        return [rank for node in nodes for rank in self._operation.context.nodes.members[node]]

    def _leader(self, distance: int) -> int:
        context = self._operation.context
        return context.nodes.members[(context.node + distance) % context.nodes.count][0]


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


def _room(operation: Operation, nbytes: int) -> int:
    """Memory for headers; alternates, because those of the next operation may be in flight too."""
    return operation.context.scratch(f"headers{operation.seq % 2}", nbytes)


def _pack(operation: Operation) -> bytes:
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
