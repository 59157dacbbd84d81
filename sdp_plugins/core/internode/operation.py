"""One operation of a group across nodes, while it runs on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _native
from ..errors import CollectiveTimeoutError, PeerLostError, SdpError, fill
from .deadlines import MOST_GRACE_S, Deadlines
from .failure_message import FailureMessage, encodable
from .group_context import GroupContext
from .transport import Channel, Pending, Stream, WireError

Piece = tuple[int, int]
"""Address and number of elements."""
LOOK_EVERY_S = 0.05


class SpanningOperation:
    """The interface for programs: steps on this node, messages to others, waits with a deadline.

    Its messages take the channels of the group's collectives, unless others are given by stream.
    """

    def __init__(
        self,
        context: GroupContext,
        request: _native.Request,
        seq: int,
        channels: Mapping[Stream, Channel[Any]] | None = None,
    ) -> None:
        self.context = context
        self.request = request
        self.seq = seq
        self.itemsize = _native.itemsize(request.dtype)
        self.name = request.op.name
        self.signature = request.signature(seq)
        self.deadlines = Deadlines(request.timeout_s)
        self._channels = channels or context.channels
        self._looked_s = time.monotonic()
        self._in_flight: dict[Stream, list[Pending]] = {}
        self._overdue = False

    @property
    def keeps_result(self) -> bool:
        """Whether a reduction changes this rank's buffer."""
        return self.request.op is not _native.Op.reduce or self.request.root == self.context.rank

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
        """Run a collective among the ranks of this node, on elements of the operation's type.

        Args:
            op: The collective.
            sends: Pieces that this rank shows to the others, as in the native ``Request``.
            recvs: Pieces that it takes from the others, as in the native ``Request``.
            root: A local rank.
            accumulates: Whether a reduction's result stays in accumulators.
        """
        whole = self.request
        request = _native.Request(
            op, whole.dtype, sends, recvs, whole.timeout_s, whole.reduce_op, root
        )
        request.factor = whole.factor
        self.run_on_node(request, accumulates=accumulates)

    def run_on_node(
        self, request: _native.Request, *, accumulates: bool = False, compares_only: bool = False
    ) -> None:
        """Run a step of this operation among the ranks of this node.

        Args:
            request: The step.
            accumulates: Whether a reduction's result stays in accumulators.
            compares_only: Whether the ranks only compare this operation, and no data moves.
        """
        deadlines, last_completed = self.deadlines, self.context.last_completed
        request.timeout_s = deadlines.on_this_node_s
        request.part = _native.Part(
            self.signature, last_completed, deadlines.extra_s, accumulates, compares_only
        )
        with self.context.channel.unattended():
            self.context.native.run(request)

    def end(self) -> None:
        """Note that the operation is done, and so is not overdue any more."""
        if self._overdue:
            self._overdue = False
            self.context.count_overdue(-1)

    # ---- other nodes ---------------------------------------------------------------------------

    def use(self, channel: Channel[Any]) -> None:
        """Use this channel alone for the operation's messages."""
        self._channels = {Stream.data: channel}

    def restarted(self, channel: Channel[Any]) -> SpanningOperation:
        """Copy the operation, with deadlines from now on and messages over another channel."""
        return SpanningOperation(self.context, self.request, self.seq, {Stream.data: channel})

    def send(
        self, peer: int, address: int, nbytes: int, stream: Stream = Stream.data
    ) -> Pending | None:
        """Start sending to a rank of another node; None: there are no bytes to send."""
        return self._start(self._channels[stream].send, peer, address, nbytes, stream)

    def receive(
        self, peer: int, address: int, nbytes: int, stream: Stream = Stream.data
    ) -> Pending | None:
        """Start receiving from a rank of another node; None: there are no bytes to receive."""
        return self._start(self._channels[stream].receive, peer, address, nbytes, stream)

    def _start(
        self,
        start: Callable[[int, int, int], Pending],
        peer: int,
        address: int,
        nbytes: int,
        stream: Stream,
    ) -> Pending | None:
        if not nbytes:
            return None
        try:
            pending = start(peer, address, nbytes)
        except WireError as error:
            raise self.lost_error(error, (peer,)) from error
        self._in_flight.setdefault(stream, []).append(pending)
        return pending

    def wait(
        self, messages: Sequence[Pending | None], stream: Stream = Stream.data, hop: int = 1
    ) -> None:
        """Wait for messages of one stream; their memory belongs to the caller again afterwards.

        Args:
            messages: The messages; None stands for no message.
            stream: The stream of the messages.
            hop: The hop of the operation's data, from 1; each hop waits for the hops before it. 0:
                headers, for which other nodes may wait in any later hop.
        """
        pending = [message for message in messages if message is not None]
        if not pending:
            return
        channel = self._channels[stream]
        try:
            channel.wait(pending, lambda: self.check(lambda: sorted(channel.late(pending)), hop))
        except WireError as error:
            peers = {message.peer for message in pending}
            raise self.lost_error(error, tuple(peers)) from error
        done = set(map(id, pending))
        self._in_flight[stream] = [m for m in self._in_flight[stream] if id(m) not in done]

    def abandon(self) -> bool:
        """Give up all messages after a failure; returns whether some are still in flight."""
        left = [
            self._channels[stream].abandon(messages)
            for stream, messages in self._in_flight.items()
            if messages
        ]
        return any(left)

    # ---- failing -------------------------------------------------------------------------------

    def check(self, late: Callable[[], Sequence[int]], hop: int = 1) -> None:
        """Raise if a wait must be given up; checks every ``LOOK_EVERY_S``.

        Args:
            late: Returns the awaited ranks that have not arrived; called at the deadline.
            hop: The hop of the data, as for ``wait``.
        """
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        self.raise_if_failed()
        if not self._overdue and self.deadlines.expired:
            self._overdue = True
            self.context.count_overdue(1)
        if self.deadlines.hop_expired(hop):
            ranks = late()
            if ranks:
                raise self.error(CollectiveTimeoutError, self._silence_of(ranks), ranks)

    def raise_if_failed(self) -> None:
        """Raise if this group has failed on another rank."""
        last_completed = self.context.last_completed
        self.context.native.check_peers(self.signature, last_completed, self.deadlines.elapsed_s)
        told = self.context.channel.received_failure()
        if told is not None:
            raise self.repeated_error(FailureMessage.unpack(told))

    def await_cause(self) -> None:
        """Wait ``MOST_GRACE_S`` for other ranks to report why they failed; raises if one does."""
        end = time.monotonic() + MOST_GRACE_S
        while time.monotonic() < end:
            self.raise_if_failed()
            time.sleep(0.02)

    def lost_error(self, error: WireError, peers: tuple[int, ...]) -> SdpError:
        """Compose the error for a broken connection; raises the cause that another rank reports."""
        self.await_cause()
        nodes, lost = self.context.nodes, set(error.peers or peers)
        # Launchers end the other ranks of a node at once, so `lost` may not be the first to end.
        mates = {mate for peer in lost for mate in nodes.members[nodes.node_of(peer)]}
        lost |= self.context.channel.gone(mates - lost)
        what = f"{nodes.name(sorted(lost))} cannot be reached any more ({error})"
        return self.error(PeerLostError, what, sorted(lost))

    def error(self, kind: type[SdpError], cause: str, ranks: Sequence[int]) -> SdpError:
        """Compose an error of this operation."""
        return self._composed(kind, self._failure(kind, cause, ranks))

    def repeated_error(self, message: FailureMessage) -> SdpError:
        """Compose the error for a failure that a rank of another node has detected."""
        nodes, failed = self.context.nodes, message.signature
        ranks = [rank for rank in message.ranks if 0 <= rank < nodes.world_size]
        if not 0 <= message.rank < nodes.world_size:  # the message could not be read
            title = f"{failed.title()}: " if failed is not None else ""
            cause = f"a rank of another node gave up: {title}{message.text}"
            return self.error(message.error_type, cause, ranks)
        failure = self._failure(message.error_type, message.text, ranks)
        failure.is_repeat = True
        failure.origin_rank = message.rank
        failure.origin_name = nodes.name([message.rank])
        here = self.signature.with_global_ranks(self.context.global_ranks)
        # The message begins with this rank's operation, and does not name the same one again.
        same = failed is not None and failed.fields == here.fields
        failure.origin_operation = None if same else failed
        return self._composed(message.error_type, failure)

    def _failure(self, kind: type[SdpError], cause: str, ranks: Sequence[int]) -> _native.Failure:
        name = "aborted" if kind is SdpError else kind.kind
        failure = _native.Failure(name, encodable(cause), sorted(set(ranks)), across_nodes=True)
        last_completed = self.context.last_completed
        failure.happened_in(self.signature, last_completed, self.deadlines.elapsed_s)
        return failure

    def _composed(self, kind: type[SdpError], failure: _native.Failure) -> SdpError:
        context = self.context
        failure.compose(context.native.error_prefix, context.rank, context.global_ranks)
        return fill(kind, failure)

    def _silence_of(self, ranks: Sequence[int]) -> str:
        who, limit_s = self.context.nodes.name(ranks), self.request.timeout_s
        any_source = self.request.op is _native.Op.recv and len(ranks) > 1
        if any_source:
            return f"none of {who} answered in {limit_s:g} s"
        return f"{who} did not answer in {limit_s:g} s"


FailGroup = Callable[[SpanningOperation, BaseException], SdpError]
"""Fails an operation's group and returns the error for the poster; never raises."""
