"""One operation of a group that spans nodes, while it runs on this rank."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .. import _native
from ..errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
)
from ..nodes import Nodes
from .costs import Costs
from .headers import Headers
from .notice import Notice
from .wire import Channel, Pending, Way, WireError

Piece = tuple[int, int]
"""Address and number of elements."""

LOOK_EVERY_S = 0.05
MOST_GRACE_S = 1.0


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

    def touches(self, other: Request) -> bool:
        """Whether the two use some of the same memory."""
        mine, theirs = self._spans(), other._spans()
        spans = sorted([(*span, 0) for span in mine] + [(*span, 1) for span in theirs])
        ends = [0, 0]
        for begin, end, owner in spans:
            if ends[1 - owner] > begin:
                return True
            ends[owner] = max(ends[owner], end)
        return False

    def _spans(self) -> list[tuple[int, int]]:
        size = _native.itemsize(self.dtype)
        pieces = (*self.sends, *self.recvs)
        return [(address, address + count * size) for address, count in pieces if count]


@dataclass
class Here:
    """Where a group's operations run.

    Attributes:
        rank: This rank.
        nodes: All ranks by node.
        native: The group of this node's ranks.
        channel: To the other nodes.
        wire_dtype: 16-bit type of float32 values between nodes; None leaves them as they are.
        costs: By which plans are chosen; equal on all ranks.
        last_completed: For messages.
        pools: Scratch memory, by name.
        node: Index of this rank's node.
        index: Of this rank among those of its node.
        local: The ranks of its node.
        others: The other nodes, from the next one on.
        channels: One for each way of collectives' messages.
    """

    rank: int
    nodes: Nodes
    native: _native.NativeGroup
    channel: Channel[Any]
    wire_dtype: _native.DType | None = None
    costs: Costs = field(default_factory=Costs)
    last_completed: str = ""
    pools: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node = self.nodes.node_of(self.rank)
        self.index = self.nodes.index_of(self.rank)
        self.local = self.nodes.members[self.node]
        self.channels: dict[Way, Channel[Any]] = {
            Way.there: self.channel,
            **{way: self.channel.branch(way) for way in (Way.further, Way.back, Way.headers)},
        }
        self._elsewhere = 0
        self._elsewhere_lock = threading.Lock()
        self.others = tuple(
            (self.node + step) % self.nodes.count for step in range(1, self.nodes.count)
        )

    def shrink(self, most_nbytes: int) -> None:
        """Give back scratch memory, the largest first: headers that are on their way are small."""
        kept = sum(pool.nbytes for pool in self.pools.values())
        for name, pool in sorted(self.pools.items(), key=lambda item: -item[1].nbytes):
            if kept <= most_nbytes:
                return
            kept -= pool.nbytes
            del self.pools[name]

    def wait_elsewhere(self, more: int) -> None:
        """Count this rank's operations that wait for other nodes longer than they should."""
        with self._elsewhere_lock:
            self._elsewhere += more
            self.native.wait_elsewhere(self._elsewhere > 0)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.index == 0


class Queue(Protocol):
    """The operations of a group, in order."""

    def look_ahead(self) -> None:
        """Tell other nodes of the next operation, if it can begin before this one has ended."""

    def follower(self, call: Call) -> Call | None:
        """Begin the next operation, if all of this node's ranks can now."""

    def finish(self, call: Call) -> None:
        """An operation is done, while one that follows it still runs."""


class Call:
    """What a program works with: steps of this node, messages to others, waits with a deadline.

    Args:
        here: The group.
        request: What to do.
        seq: Its number.
        channels: Where messages go, if not where the group's collectives send theirs.
        queue: Where it comes from, if others can follow before it has ended.
    """

    def __init__(
        self,
        here: Here,
        request: Request,
        seq: int,
        channels: Mapping[Way, Channel[Any]] | None = None,
        queue: Queue | None = None,
    ) -> None:
        self.here = here
        self._queue = queue
        self._channels = channels or here.channels
        self.request = request
        self.seq = seq
        self.itemsize = _native.itemsize(request.dtype)
        self.op = request.op.name
        self.title = " ".join(filter(None, (f"{self.op} #{seq}", request.shape)))
        self._started_s = time.monotonic()
        self._looked_s = self._started_s
        self._open: dict[Way, list[Pending]] = {}
        self._headers: Headers | None = None
        self._overdue = False
        self.hops = 1
        """Of its data, when nodes wait for each other in each."""

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
        self._step(
            op, request.dtype, request.reduce_op, sends, recvs, root=root, accumulates=accumulates
        )

    def _step(
        self,
        op: _native.Op,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        sends: Sequence[Piece],
        recvs: Sequence[Piece],
        *,
        root: int = -1,
        accumulates: bool = False,
    ) -> None:
        with self.here.channel.unattended():
            self.here.native.run_part(
                self.title,
                self.here.last_completed,
                self.seq,
                accumulates,
                op,
                dtype,
                reduce_op,
                self.request.factor,
                root,
                list(sends),
                list(recvs),
                self._left_s(1),
                self._patience_s(),
            )

    def restart(self) -> None:
        """Have the time-out begin now."""
        self._started_s = time.monotonic()

    def end(self) -> None:
        """The operation is done."""
        if self._overdue:
            self._overdue = False
            self.here.wait_elsewhere(-1)

    def announce(self) -> Headers:
        """On a node's first rank: tell the other nodes what is called, if they have not been."""
        if self._headers is None:
            self._headers = Headers(self)
        return self._headers

    def begin(self, *, gate: bool = True) -> None:
        """Compare what all ranks have called, before anything moves.

        Args:
            gate: Whether ranks other than their node's first go on to use the network, for which
                all have to wait until the nodes agree.
        """
        self.restart()
        request = self.request
        with self.here.channel.unattended():
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
                self._left_s(1),
                self._patience_s(),
            )
        self.restart()  # all ranks of the node are here now: their deadlines are alike
        if self.here.leads:
            self.announce().compare()
        if gate and len(self.here.local) > 1:
            self.step(_native.Op.barrier, (), ())

    def all_agree(self, mine: bool) -> bool:
        """Whether all ranks of this node say yes."""
        if len(self.here.local) == 1:
            return mine
        answer = self.scratch("answer", 1)
        ctypes.memset(answer, mine, 1)
        self._step(
            _native.Op.all_reduce, _native.DType.uint8, _native.ReduceOp.min, [], [(answer, 1)]
        )
        return ctypes.string_at(answer, 1) != b"\0"

    # ---- the next operation --------------------------------------------------------------------

    def look_ahead(self) -> None:
        """See ``Queue``."""
        if self._queue is not None:
            self._queue.look_ahead()

    def follower(self) -> Call | None:
        """See ``Queue``."""
        return self._queue.follower(self) if self._queue is not None else None

    def finish(self) -> None:
        """See ``Queue``."""
        if self._queue is not None:
            self._queue.finish(self)

    # ---- other nodes ---------------------------------------------------------------------------

    def use(self, channel: Channel[Any]) -> None:
        """Have its messages go there."""
        self._channels = {Way.there: channel}

    def again(self, channel: Channel[Any]) -> Call:
        """The same, from now on, with other messages."""
        return Call(self.here, self.request, self.seq, {Way.there: channel})

    def send(self, peer: int, address: int, nbytes: int, way: Way = Way.there) -> Pending | None:
        """Start sending to a rank of another node; None: there was nothing to send."""
        return self._start(self._channels[way].send, peer, address, nbytes, way)

    def receive(self, peer: int, address: int, nbytes: int, way: Way = Way.there) -> Pending | None:
        """Start receiving from a rank of another node."""
        return self._start(self._channels[way].receive, peer, address, nbytes, way)

    def _start(
        self,
        start: Callable[[int, int, int], Pending],
        peer: int,
        address: int,
        nbytes: int,
        way: Way,
    ) -> Pending | None:
        if not nbytes:
            return None
        try:
            pending = start(peer, address, nbytes)
        except WireError as error:
            raise self.explained(error, (peer,)) from error
        self._open.setdefault(way, []).append(pending)
        return pending

    def wait(self, messages: Sequence[Pending | None], way: Way = Way.there, hop: int = 1) -> None:
        """Wait for messages of one way; their memory is the caller's again.

        Args:
            messages: Those, but for None.
            way: Theirs.
            hop: Of the operation's data, from 1, when each waits for those before it; 0: of what is
                said before, for which other nodes may wait in any later hop.
        """
        pending = [message for message in messages if message is not None]
        if not pending:
            return
        channel = self._channels[way]
        try:
            channel.wait(pending, lambda: self.watch(lambda: sorted(channel.late(pending)), hop))
        except WireError as error:
            peers = {message.peer for message in pending}
            raise self.explained(error, tuple(peers)) from error
        done = set(map(id, pending))
        self._open[way] = [message for message in self._open[way] if id(message) not in done]

    def done(self, messages: Sequence[Pending | None], way: Way = Way.there) -> bool:
        """Whether messages of one way are done, without waiting."""
        pending = [message for message in messages if message is not None]
        with suppress(WireError):  # whoever waits for them hears of it
            return self._channels[way].done(pending)
        return False

    def abandon(self) -> bool:
        """Give up what is on its way, after a failure; whether some of it still is."""
        left = [
            self._channels[way].abandon(messages)
            for way, messages in self._open.items()
            if messages
        ]
        return any(left)

    def explained(self, error: WireError, peers: tuple[int, ...]) -> SdpError:
        """What a broken connection means, unless whoever broke it says so himself."""
        self.listen()
        nodes, lost = self.here.nodes, set(error.peers or peers)
        # Launchers end the other ranks of a node at once: those may not be the first that went.
        mates = {mate for peer in lost for mate in nodes.members[nodes.node_of(peer)]}
        lost |= self.here.channel.gone(mates - lost)
        what = f"{nodes.name(sorted(lost))} cannot be reached any more ({error})"
        return self.error(PeerLostError, what, sorted(lost))

    def watch(self, late: Callable[[], Sequence[int]], hop: int = 1) -> None:
        """Look, now and then, whether a wait must be given up.

        Args:
            late: The ranks that it is for and that have not come; asked when the time is over.
            hop: See ``wait``.
        """
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        self.look()
        if not self._overdue and self._left_s(0) <= 0.001:
            self._overdue = True
            self.here.wait_elsewhere(1)
        if self._left_s(2 + hop) <= 0.001:
            ranks = late()
            if ranks:
                raise self.error(CollectiveTimeoutError, self._silence(ranks), ranks)

    def _silence(self, ranks: Sequence[int]) -> str:
        who, limit_s = self.here.nodes.name(ranks), self.request.timeout_s
        one_of_them = self.request.op is _native.Op.recv and len(ranks) > 1
        return (
            f"none of {who} answered in {limit_s:g} s"
            if one_of_them
            else (f"{who} did not answer in {limit_s:g} s")
        )

    def listen(self) -> None:
        """Give others the time to say why they have failed: raises that."""
        end = time.monotonic() + MOST_GRACE_S
        while time.monotonic() < end:
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        """Raise if this group has failed elsewhere."""
        self.here.native.watch(self.title)
        told = self.here.channel.told()
        if told is not None:
            raise Notice.unpack(told).error(self)

    def _left_s(self, graces: int) -> float:
        """Seconds until a wait ends; whoever is nearer to a cause is given the time to name it.

        Of a chain of ranks that wait for each other, the last one to wait is the first to give up:
        a rank that waits for another one here gives up after one grace, but is patient if that one
        says that it waits for another node. A rank that waits to hear what another node calls gives
        up after two, and one that waits for data after one more for each hop.
        """
        limit_s = self.request.timeout_s
        return max(limit_s + graces * self._grace_s - self.elapsed_s, 0.001)

    @property
    def _grace_s(self) -> float:
        return min(MOST_GRACE_S, 0.2 * self.request.timeout_s)

    def _patience_s(self) -> float:
        return (2 + self.hops) * self._grace_s

    # ---- memory --------------------------------------------------------------------------------

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of memory of the group's that lasts until it is asked for by this name again."""
        pools = self.here.pools
        if name not in pools or pools[name].nbytes < nbytes:
            pools[name] = np.empty(max(nbytes, 1), np.uint8)
        return _native.address(pools[name])

    # ---- failing -------------------------------------------------------------------------------

    def error(self, kind: type[SdpError], what: str, ranks: Sequence[int]) -> SdpError:
        """Write an error of this operation."""
        here = self.here
        last = f" (last completed: {here.last_completed})" if here.last_completed else ""
        text = (
            f"{here.native.head}{self.title}: {what}{last}. "
            f"Hint: {_HINTS.get(kind, 'see the other ranks.')}"
        )
        return kind(text, ranks=set(ranks), op=self.op, seq=self.seq, elapsed_s=self.elapsed_s)


_HINTS: dict[type[SdpError], str] = {
    PeerLostError: "look for that rank's own error or traceback, and whether its node is up.",
    CollectiveTimeoutError: "that rank is stopped, still computing, or took another path through "
    "the program, or the network to its node is down; if it is only slow, raise the group's "
    "timeout (SDP_TIMEOUT_S, unless the program gives one).",
    CollectiveMismatchError: "all ranks must call the same operations in the same order, with the "
    "same types and sizes, and fusion buffers of the same tensors.",
}


def closed(here: Here) -> SdpError:
    """What use of a closed group raises."""
    return SdpError(here.native.head + "the group is closed. Hint: make a new one.")
