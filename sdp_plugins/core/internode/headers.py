"""The headers that the nodes' leaders exchange before an operation's data moves.

A header describes a call in 44 bytes. Up to ``DIRECT`` nodes, each of M nodes sends its header to
all M - 1 others, in one step.

More nodes disseminate their headers (Hensgen, Finkel, Manber 1988, "Two algorithms for barrier
synchronization"). In round i of ceil(log2(M)), each node sends the headers that it keeps to the
node 2^i further and receives those of the node 2^i before; each round doubles the number of nodes
covered. Of all headers a node keeps two: the lowest node's, and that of the lowest node whose
header differs. The headers that two nodes have kept suffice to find these two among all that both
have covered. At the end all nodes hold the same two headers, or one if all agree. Dissemination
takes ceil(log2(M)) steps, with one message of 96 bytes from each node in each step.

With either method, a leader that has compared knows that all nodes have arrived and call the same
operation, or raises.
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
"""Most nodes that exchange headers directly; the error message can then name all differences."""

Said = dict[int, bytes]
"""Headers by node."""

_COMPARED = struct.calcsize("<QiiiiIQ")
_HEADER = struct.Struct("<QiiiiIQQ")
"""The fields that must be equal, and the number of elements, which may differ."""
_KEPT = struct.Struct(f"<i{_HEADER.size}s")
"""A header to forward, behind the index of its node."""
_NOBODY = _KEPT.pack(-1, b"")


class Headers:
    """The headers of one operation.

    Args:
        operation: The operation.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        few = operation.context.nodes.count <= DIRECT
        self._exchange: _Direct | _Dissemination = (_Direct if few else _Dissemination)(operation)

    def arrived(self) -> bool:
        """Whether all headers are known to have arrived and to agree."""
        return self._exchange.arrived() and len(first_two(self._exchange.read())) == 1

    def compare(self) -> None:
        """Wait for all headers and compare them.

        Raises:
            CollectiveMismatchError: They differ.
        """
        self._exchange.wait()
        said = self._exchange.read()
        if len(first_two(said)) > 1:
            self._disagree(said)

    def _disagree(self, said: Said) -> None:
        operation, nodes = self._operation, self._operation.context.nodes
        ranks = operation.context.global_ranks
        parties: dict[bytes, list[int]] = {}
        for node, header in sorted(said.items()):  # sizes in titles may differ
            parties.setdefault(header[:_COMPARED], []).append(node)
        words = "; ".join(
            f"{nodes.name(self._ranks_on(at))}: {_title(said[at[0]], ranks)}"
            for at in parties.values()
        )
        largest = max(parties.values(), key=len)
        blamed = [node for node in said if node not in largest]
        if len(said) < nodes.count:  # unknown how many nodes agree with each
            words += f" (of {nodes.count} nodes, the first that differ)"
            blamed = list(said)
        raise operation.error(
            CollectiveMismatchError, f"ranks disagree: {words}", self._ranks_on(blamed)
        )

    def _ranks_on(self, nodes: Iterable[int]) -> list[int]:
        return [rank for node in nodes for rank in self._operation.context.nodes.members[node]]


class _Direct:
    """Each node sends its header to all others; the messages start with the constructor."""

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
        """Whether all headers have arrived; does not wait."""
        return self._operation.done(self._messages, Stream.headers)

    def wait(self) -> None:
        """Wait for all headers."""
        self._operation.wait(self._messages, Stream.headers, hop=0)

    def read(self) -> Said:
        """All headers, once they have arrived."""
        said = {
            node: ctypes.string_at(address, _HEADER.size) for node, address in self._theirs.items()
        }
        return said | {self._operation.context.node: self._mine}


class _Dissemination:
    """Headers spread in rounds; each waits for the one before, so ``wait`` does all the work."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        context, size = operation.context, 2 * _KEPT.size
        self._known = {context.node: _pack(operation)}
        self._distances = distances(context.nodes.count)
        self._room = _room(operation, (1 + len(self._distances)) * size)
        self._theirs = [self._room + n * size for n in range(1, 1 + len(self._distances))]
        # Posted for all rounds at once: a node that is ahead need not wait for a slower one.
        self._arriving = [
            operation.receive(self._leader(-distance), address, size, Stream.headers)
            for distance, address in zip(self._distances, self._theirs, strict=True)
        ]

    def arrived(self) -> bool:
        """Never known without waiting; ``can_follow`` excludes this case."""
        return False

    def wait(self) -> None:
        """Run all rounds.

        The neighbours of a node that does not arrive wait in the first round. Other nodes may wait
        for these neighbours in a later round, so later rounds get one more grace period, as
        data does.
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
        """The lowest node's header, and the lowest one that differs from it."""
        return self._known

    def _leader(self, distance: int) -> int:
        context = self._operation.context
        return _leader(self._operation, (context.node + distance) % context.nodes.count)


def distances(nodes: int) -> list[int]:
    """Distance between sender and receiver in each round of a dissemination."""
    return [1 << n for n in range((nodes - 1).bit_length())]


def first_two(said: Said) -> Said:
    """The lowest node's header, and that of the lowest node whose header differs, if any."""
    first, *others = sorted(said)
    differ = [node for node in others if said[node][:_COMPARED] != said[first][:_COMPARED]]
    return {node: said[node] for node in (first, *differ[:1])}


def _write(known: Said) -> bytes:
    kept = [_KEPT.pack(*item) for item in known.items()]
    return b"".join([*kept, _NOBODY][:2])


def _read(known: bytes) -> Said:
    return {node: header for node, header in _KEPT.iter_unpack(known) if node >= 0}


def _room(operation: Operation, nbytes: int) -> int:
    """Memory for headers; alternates, because those of the next operation may be in flight too."""
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
