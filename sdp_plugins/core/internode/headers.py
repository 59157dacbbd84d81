"""What the first ranks of the nodes tell each other of an operation, before its data moves."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _native
from ..errors import CollectiveMismatchError
from .wire import Way

if TYPE_CHECKING:
    from .call import Call

DIRECT = 16
"""Up to so many nodes everyone compares with everyone, so that the message can tell it all."""

_HEADER = struct.Struct("<QiiiiIQ220s")
_COMPARED = _HEADER.size - 220


class Headers:
    """One operation's, on their way from the moment that this is made.

    Args:
        call: The operation.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        here = call.here
        few = here.nodes.count <= DIRECT
        targets, sources = (here.others,) * 2 if few else (here.others[:1], here.others[-1:])
        self._mine = _pack(call)
        size = _HEADER.size
        # Those of the next operation may be on their way, too.
        room = call.scratch(f"headers{call.seq % 2}", (1 + len(sources)) * size)
        ctypes.memmove(room, self._mine, size)
        self._theirs = {node: room + n * size for n, node in enumerate(sources, 1)}
        self._messages = [
            call.receive(self._leader(node), address, size, Way.headers)
            for node, address in self._theirs.items()
        ]
        self._messages += [
            call.send(self._leader(node), room, size, Way.headers) for node in targets
        ]

    def arrived(self) -> bool:
        """Whether all are there, and alike."""
        if not self._call.done(self._messages, Way.headers):
            return False
        return all(map(self._alike, self._read().values()))

    def compare(self) -> None:
        """Wait for them.

        Raises:
            CollectiveMismatchError: They are not alike.
        """
        call, nodes = self._call, self._call.here.nodes
        call.wait(self._messages, Way.headers, hop=0)
        said = self._read()
        if all(map(self._alike, said.values())):
            return
        said[call.here.node] = self._mine
        parties: dict[bytes, list[int]] = {}
        for node, header in sorted(said.items()):  # titles may differ: sizes need not be equal
            parties.setdefault(header[:_COMPARED], []).append(node)
        words = "; ".join(
            f"{nodes.name(self._ranks_on(at))}: {_title(said[at[0]])}" for at in parties.values()
        )
        largest = max(parties.values(), key=len)
        blamed = self._ranks_on([node for node in said if node not in largest])
        raise call.error(CollectiveMismatchError, f"ranks disagree: {words}", blamed)

    def _read(self) -> dict[int, bytes]:
        return {
            node: ctypes.string_at(address, _HEADER.size) for node, address in self._theirs.items()
        }

    def _alike(self, header: bytes) -> bool:
        return header[:_COMPARED] == self._mine[:_COMPARED]

    def _leader(self, node: int) -> int:
        return self._call.here.nodes.members[node][0]

    def _ranks_on(self, nodes: Sequence[int]) -> list[int]:
        return [rank for node in nodes for rank in self._call.here.nodes.members[node]]


def _pack(call: Call) -> bytes:
    request = call.request
    return _HEADER.pack(
        call.seq,
        int(request.op),
        int(request.dtype) if request.op is not _native.Op.barrier else 0,
        int(request.reduce_op) if _native.reduces(request.op) else 0,
        request.root,
        request.layout,
        request.count if _native.counts_must_agree(request.op) else 0,
        call.title.encode()[:220],
    )


def _title(header: bytes) -> str:
    title: bytes = _HEADER.unpack(header)[-1]
    return title.rstrip(b"\0").decode(errors="replace")
