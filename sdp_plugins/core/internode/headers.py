"""What the first ranks of the nodes tell each other of an operation, before its data moves.

Each says what it calls in a header of 44 bytes. Up to ``DIRECT`` nodes all tell all others at
once: one step, and M - 1 headers from each of M nodes.

Among more nodes headers are disseminated (Hensgen, Finkel, Manber 1988, "Two algorithms for barrier
synchronization"): in round i of ceil(log2(M)) each node tells the one 2^i further what it knows,
and hears what the one 2^i before knows, which doubles the number of nodes that it knows of. Of all
their headers it keeps two, the lowest node's and that of the lowest node that differs from it: what
two nodes have kept is enough to find the same two of all headers that they know. In the end all
nodes hold the same two, or one where nobody differs. That is ceil(log2(M)) steps, and a message of
96 bytes from each node in each.

Either way who has compared knows that all nodes have come and call the same, or raises.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

from .. import _native
from ..errors import CollectiveMismatchError
from .operation import Operation
from .transport import Stream

DIRECT = 16
"""Up to so many nodes everyone compares with everyone, so that the message can tell it all."""

Said = dict[int, bytes]
"""Headers by node."""

_COMPARED = struct.calcsize("<QiiiiIQ")
_HEADER = struct.Struct("<QiiiiIQQ")
"""What must be equal, and the number of elements, which need not be."""
_KEPT = struct.Struct(f"<i{_HEADER.size}s")
"""A header that is passed on, and whose it is."""
_NOBODY = _KEPT.pack(-1, b"")


class Headers:
    """One operation's.

    Args:
        operation: The operation.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        few = operation.context.nodes.count <= DIRECT
        self._exchange: _Direct | _Dissemination = (_Direct if few else _Dissemination)(operation)

    def arrived(self) -> bool:
        """Whether all are known to be there, and alike."""
        return self._exchange.arrived() and len(first_two(self._exchange.read())) == 1

    def compare(self) -> None:
        """Wait for them.

        Raises:
            CollectiveMismatchError: They are not alike.
        """
        self._exchange.wait()
        said = self._exchange.read()
        if len(first_two(said)) > 1:
            self._disagree(said)

    def _disagree(self, said: Said) -> None:
        operation, nodes = self._operation, self._operation.context.nodes
        ranks = operation.context.global_ranks
        parties: dict[bytes, list[int]] = {}
        for node, header in sorted(said.items()):  # titles may differ: sizes need not be equal
            parties.setdefault(header[:_COMPARED], []).append(node)
        words = "; ".join(
            f"{nodes.name(self._ranks_on(at))}: {_title(said[at[0]], ranks)}"
            for at in parties.values()
        )
        largest = max(parties.values(), key=len)
        blamed = [node for node in said if node not in largest]
        if len(said) < nodes.count:  # no telling how many stand behind either
            words += f" (of {nodes.count} nodes, the first that differ)"
            blamed = list(said)
        raise operation.error(
            CollectiveMismatchError, f"ranks disagree: {words}", self._ranks_on(blamed)
        )

    def _ranks_on(self, nodes: Iterable[int]) -> list[int]:
        return [rank for node in nodes for rank in self._operation.context.nodes.members[node]]


class _Direct:
    """All nodes tell all others, from the moment that this is made."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        others = operation.context.other_nodes
        self._mine, size = _pack(operation), _HEADER.size
        room = _room(operation, (1 + len(others)) * size)
        ctypes.memmove(room, self._mine, size)
        self._theirs = {node: room + n * size for n, node in enumerate(others, 1)}
        self._messages = [
            operation.receive(_leader(operation, node), address, size, Stream.headers)
            for node, address in self._theirs.items()
        ]
        self._messages += [
            operation.send(_leader(operation, node), room, size, Stream.headers) for node in others
        ]

    def arrived(self) -> bool:
        """Whether all are there, without waiting."""
        return self._operation.done(self._messages, Stream.headers)

    def wait(self) -> None:
        """Wait for all."""
        self._operation.wait(self._messages, Stream.headers, hop=0)

    def read(self) -> Said:
        """All, once they are there."""
        said = {
            node: ctypes.string_at(address, _HEADER.size) for node, address in self._theirs.items()
        }
        return said | {self._operation.context.node: self._mine}


class _Dissemination:
    """Each round waits for the one before, so that nothing happens but in ``wait``."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        context, size = operation.context, 2 * _KEPT.size
        self._known = {context.node: _pack(operation)}
        self._distances = distances(context.nodes.count)
        self._room = _room(operation, (1 + len(self._distances)) * size)
        self._theirs = [self._room + n * size for n in range(1, 1 + len(self._distances))]
        # At once for all rounds: who is ahead can tell, and need not wait for who is behind.
        self._arriving = [
            operation.receive(self._leader(-distance), address, size, Stream.headers)
            for distance, address in zip(self._distances, self._theirs, strict=True)
        ]

    def arrived(self) -> bool:
        """Nobody asks: see ``can_follow``."""
        return False

    def wait(self) -> None:
        """Go through all rounds.

        Of a node that does not come its neighbours wait in the first round, others perhaps in a
        later one for these: with one more grace, as for data, whose waits are as long.
        """
        operation = self._operation
        for n, distance in enumerate(self._distances):
            known = _write(self._known)
            ctypes.memmove(self._room, known, len(known))
            leaving = operation.send(self._leader(distance), self._room, len(known), Stream.headers)
            operation.wait([self._arriving[n], leaving], Stream.headers, hop=min(n, 1))
            theirs = ctypes.string_at(self._theirs[n], len(known))
            self._known = first_two(self._known | _read(theirs))

    def read(self) -> Said:
        """The first, and the first that differs."""
        return self._known

    def _leader(self, distance: int) -> int:
        context = self._operation.context
        return _leader(self._operation, (context.node + distance) % context.nodes.count)


def distances(nodes: int) -> list[int]:
    """How far word goes in each round of a dissemination."""
    return [1 << n for n in range((nodes - 1).bit_length())]


def first_two(said: Said) -> Said:
    """The lowest node's header, and that of the lowest node that differs from it, if one does."""
    first, *others = sorted(said)
    differ = [node for node in others if said[node][:_COMPARED] != said[first][:_COMPARED]]
    return {node: said[node] for node in (first, *differ[:1])}


def _write(known: Said) -> bytes:
    kept = [_KEPT.pack(*item) for item in known.items()]
    return b"".join([*kept, _NOBODY][:2])


def _read(known: bytes) -> Said:
    return {node: header for node, header in _KEPT.iter_unpack(known) if node >= 0}


def _room(operation: Operation, nbytes: int) -> int:
    """Memory for messages: those of the next operation may be on their way, too."""
    return operation.context.scratch(f"headers{operation.seq % 2}", nbytes)


def _leader(operation: Operation, node: int) -> int:
    return operation.context.nodes.members[node][0]


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
