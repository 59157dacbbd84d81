"""One operation of a group that spans nodes, while it runs on this rank."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _native
from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
)
from ..nodes import Nodes
from .notice import Notice
from .wire import Channel, Pending, WireError

Piece = tuple[int, int]
"""Address and number of elements."""

LOOK_EVERY_S = 0.05
MOST_GRACE_S = 1.0
DIRECT_HEADERS = 16
"""Up to so many nodes everyone compares with everyone, so that the message can tell it all."""

_HEADER = struct.Struct("<QiiiiIQ220s")


@dataclass(frozen=True)
class Request:
    """An operation as its caller describes it; the counterpart of the native one."""

    op: _native.Op
    dtype: _native.DType
    reduce_op: _native.ReduceOp
    factor: float
    root: int
    sends: tuple[Piece, ...]
    recvs: tuple[Piece, ...]
    timeout_s: float
    layout: int = 0
    peer: int = -1
    tag: int = 0
    shape: str = ""

    @property
    def count(self) -> int:
        """Elements that all ranks must agree on."""
        if self.op is _native.Op.all_reduce:
            return sum(count for _, count in self.recvs)
        return max((count for _, count in (*self.sends, *self.recvs)), default=0)


@dataclass
class Here:
    """Where a group's operations run.

    Attributes:
        rank: This rank.
        nodes: All ranks by node.
        native: The group of this node's ranks.
        channel: To the other nodes.
        wire_dtype: 16-bit type of float32 values between nodes; None leaves them as they are.
        last_completed: For messages.
    """

    rank: int
    nodes: Nodes
    native: _native.NativeGroup
    channel: Channel[Any]
    wire_dtype: _native.DType | None = None
    last_completed: str = ""
    pools: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node = self.nodes.node_of(self.rank)
        self.index = self.nodes.index_of(self.rank)
        self.local = self.nodes.members[self.node]
        self.others = tuple(
            (self.node + step) % self.nodes.count for step in range(1, self.nodes.count)
        )

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.index == 0


class Call:
    """What a program works with: steps of this node, messages to others, waits with a deadline."""

    def __init__(
        self, here: Here, request: Request, seq: int, channel: Channel[Any] | None = None
    ) -> None:
        self.here = here
        self._channel = channel or here.channel
        self.request = request
        self.seq = seq
        self.itemsize = _native.itemsize(request.dtype)
        self.op = request.op.name
        self.title = " ".join(filter(None, (f"{self.op} #{seq}", request.shape)))
        self._started_s = time.monotonic()
        self._looked_s = self._started_s
        self._open: list[Pending] = []
        self._waits_for: Sequence[Pending] = ()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started_s

    # ---- this node -----------------------------------------------------------------------------

    def step(
        self,
        op: _native.Op,
        sends: Sequence[Piece],
        recvs: Sequence[Piece],
        *,
        root: int = -1,
        accumulates: bool = False,
    ) -> None:
        """Run a collective among the ranks of this node.

        Args:
            op: Which.
            sends: See the native ``Request``.
            recvs: As well.
            root: By its index on this node.
            accumulates: Whether a reduction's result stays in accumulators.
        """
        request = self.request
        self.here.native.run_part(
            self.title,
            self.here.last_completed,
            self.seq,
            accumulates,
            op,
            request.dtype,
            request.reduce_op,
            request.factor,
            root,
            list(sends),
            list(recvs),
            # Who is waited for may itself wait for another node: that wait ends first.
            self._left_s(2),
        )

    def begin(self, *, gate: bool = True) -> None:
        """Compare what all ranks have called, before anything moves.

        Args:
            gate: Whether ranks other than their node's first go on to use the network, for which
                all have to wait until the nodes agree.
        """
        request = self.request
        self.here.native.compare(
            self.title,
            self.here.last_completed,
            self.seq,
            request.op,
            request.dtype,
            request.reduce_op,
            request.root,
            request.layout,
            request.count,
            self._left_s(0),
        )
        if self.here.leads:
            self._compare_nodes()
        if gate and len(self.here.local) > 1:
            self.step(_native.Op.barrier, (), ())

    def _header(self) -> bytes:
        request = self.request
        agreed = _native.counts_must_agree(request.op)
        reduces = _native.reduces(request.op)
        return _HEADER.pack(
            self.seq,
            int(request.op),
            int(request.dtype) if request.op is not _native.Op.barrier else 0,
            int(request.reduce_op) if reduces else 0,
            request.root,
            request.layout,
            request.count if agreed else 0,
            self.title.encode()[:220],
        )

    def _compare_nodes(self) -> None:
        """Swap what this node calls with what the others call."""
        here, mine = self.here, self._header()
        nodes = here.others if here.nodes.count <= DIRECT_HEADERS else here.others[:1]
        sources = nodes if here.nodes.count <= DIRECT_HEADERS else here.others[-1:]
        buffer = np.frombuffer(bytearray(mine), np.uint8)
        theirs = {node: np.empty(_HEADER.size, np.uint8) for node in sources}
        messages = [
            self.receive(here.nodes.members[node][0], *_of(theirs[node])) for node in sources
        ]
        messages += [self.send(here.nodes.members[node][0], *_of(buffer)) for node in nodes]
        self.wait(messages)
        compared = _HEADER.size - 220
        said = {node: theirs[node].tobytes() for node in sources}
        if all(other[:compared] == mine[:compared] for other in said.values()):
            return
        said[here.node] = mine
        parties: dict[bytes, list[int]] = {}
        for node, header in sorted(said.items()):  # titles may differ: sizes need not be equal
            parties.setdefault(header[:compared], []).append(node)
        words = "; ".join(
            f"{here.nodes.name(self._ranks_on(at))}: {_title(said[at[0]])}"
            for at in parties.values()
        )
        largest = max(parties.values(), key=len)
        blamed = self._ranks_on([node for node in said if node not in largest])
        raise self.error(CollectiveMismatchError, f"ranks disagree: {words}", blamed)

    def _ranks_on(self, nodes: Sequence[int]) -> list[int]:
        return [rank for node in nodes for rank in self.here.nodes.members[node]]

    # ---- other nodes ---------------------------------------------------------------------------

    def send(self, peer: int, address: int, nbytes: int) -> Pending | None:
        """Start sending to a rank of another node; None: there was nothing to send."""
        return self._start(self._channel.send, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> Pending | None:
        """Start receiving from a rank of another node."""
        return self._start(self._channel.receive, peer, address, nbytes)

    def _start(
        self, start: Callable[[int, int, int], Pending], peer: int, address: int, nbytes: int
    ) -> Pending | None:
        if not nbytes:
            return None
        try:
            pending = start(peer, address, nbytes)
        except WireError as error:
            raise self._explained(error, (peer,)) from error
        self._open.append(pending)
        return pending

    def wait(self, messages: Sequence[Pending | None]) -> None:
        """Wait for messages; their memory is the caller's again."""
        pending = [message for message in messages if message is not None]
        if not pending:
            return
        self._waits_for = pending
        try:
            self._channel.wait(pending, self._watch)
        except WireError as error:
            peers = {message.peer for message in pending}
            raise self._explained(error, tuple(peers)) from error
        done = set(map(id, pending))
        self._open = [message for message in self._open if id(message) not in done]

    def abandon(self) -> bool:
        """Give up what is on its way, after a failure; whether some of it still is."""
        return bool(self._open) and self._channel.abandon(self._open)

    def _explained(self, error: WireError, peers: tuple[int, ...]) -> SdpError:
        """What a broken connection means, unless whoever broke it says so himself."""
        end = time.monotonic() + MOST_GRACE_S
        while time.monotonic() < end:
            self._look()
            time.sleep(0.02)
        lost = error.peers or peers
        what = f"{self.here.nodes.name(lost)} cannot be reached any more ({error})"
        return self.error(PeerLostError, what, lost)

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        self._look()
        if self._left_s(1) <= 0.001:
            late = sorted(self._channel.late(self._waits_for))
            if late:
                limit_s = self.request.timeout_s
                what = f"{self.here.nodes.name(late)} did not answer in {limit_s:g} s"
                raise self.error(CollectiveTimeoutError, what, late)

    def _look(self) -> None:
        """Raise if this group has failed elsewhere."""
        self.here.native.watch(self.title)
        told = self.here.channel.told()
        if told is not None:
            raise Notice.unpack(told).error(self)

    def _left_s(self, graces: int) -> float:
        """Seconds until a wait ends; whoever is nearer to a cause is given the time to name it."""
        limit_s = self.request.timeout_s
        grace_s = min(MOST_GRACE_S, 0.2 * limit_s)
        return max(limit_s + graces * grace_s - self.elapsed_s, 0.001)

    # ---- memory --------------------------------------------------------------------------------

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of memory of the group's that lasts until it is asked for by this name again."""
        pools = self.here.pools
        if name not in pools or pools[name].nbytes < nbytes:
            pools[name] = np.empty(max(nbytes, 1), np.uint8)
        return _of(pools[name])[0]

    # ---- failing -------------------------------------------------------------------------------

    def error(self, kind: type[SdpError], what: str, ranks: Sequence[int]) -> SdpError:
        """Write an error of this operation."""
        here = self.here
        last = f" (last completed: {here.last_completed})" if here.last_completed else ""
        text = (
            f"[rank {here.rank}/{here.nodes.world_size}] {self.title}: {what}{last}. "
            f"Hint: {_HINTS.get(kind, 'see the other ranks.')}"
        )
        return kind(text, ranks=set(ranks), op=self.op, seq=self.seq, elapsed_s=self.elapsed_s)


_HINTS: dict[type[SdpError], str] = {
    PeerLostError: "look for that rank's own error or traceback, and whether its node is up.",
    CollectiveTimeoutError: "that rank is stopped, still computing, or took another path through "
    "the program, or the network to its node is down; if it is only slow, raise the group's "
    "timeout (SDP_TIMEOUT_S).",
    CollectiveMismatchError: "all ranks must call the same operations in the same order, with the "
    "same types and sizes, and fusion buffers of the same tensors.",
}


def closed(here: Here) -> SdpError:
    """What use of a closed group raises."""
    head = f"[rank {here.rank}/{here.nodes.world_size}] "
    return SdpError(head + "the group is closed. Hint: make a new one.")


def _title(header: bytes) -> str:
    title: bytes = _HEADER.unpack(header)[-1]
    return title.rstrip(b"\0").decode(errors="replace")


def _of(array: np.ndarray) -> tuple[int, int]:
    return _native.address(array), array.nbytes
