"""Receives the messages of a rank of another node."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .. import _native
from ..errors import PeerLostError
from .leaked import abandon, leak
from .matching import SpanningMatching, UnwantedError
from .operation import LOOK_EVERY_S, FailGroup, SpanningOperation
from .posted import ANY, Envelope, PostedReceive, UnexpectedMessage
from .transport import Channel, Pending, WireError


class Receiver:
    """A thread that receives a rank's messages while receives wait for them.

    It receives one envelope at a time, and then the message directly into the memory of its
    receive. A receive from any rank may be served by another rank while the thread waits for an
    envelope or holds one. The thread then keeps that state until another receive needs it. It has
    the channel for itself.
    """

    def __init__(
        self, peer: int, matching: SpanningMatching, channel: Channel[Any], fail: FailGroup
    ) -> None:
        self._peer = peer
        self._matching = matching
        self._channel = channel
        self._fail_group = fail
        self._head = bytearray(Envelope.SIZE)
        self._asked: Pending | None = None
        self._envelope: Envelope | None = None  # its message is still with its sender
        self._post: PostedReceive | None = None  # its message is arriving
        self._operation: SpanningOperation | None = None  # its deadline limits the wait
        self._looked_s = 0.0
        self.abandoned = False
        """Whether messages were in flight when one failed."""
        self.thread = threading.Thread(target=self._loop, name=f"sdp-recv-{peer}", daemon=True)
        self.thread.start()

    def withdraw(self) -> None:
        """Take back the receive of an envelope as the group closes, after the thread has ended."""
        if self._asked is not None and self._channel.withdraw([self._asked]):
            leak(self._head)
            self.abandoned = True

    def _loop(self) -> None:
        while self._matching.await_want(self._peer):
            try:
                self._next_message()
            except UnwantedError:
                pass
            except BaseException as error:
                self._fail(error)

    def _next_message(self) -> None:
        failed = self._matching.failed_on_node()
        if failed is not None:  # it failed before this thread waited for it: tell the other nodes
            self._operation = failed.operation
            self._look_once_more()
        envelope = self._envelope = self._envelope or self._await_envelope()
        post, matches = self._matching.match(self._peer, envelope.tag)
        self._envelope = None
        if matches:
            self._deliver(post, envelope)
        else:
            self._receive_unexpected(post.operation, envelope)

    # ---- envelopes -------------------------------------------------------------------------------

    def _await_envelope(self) -> Envelope:
        self._operation = self._matching.wanting(self._peer)[0].operation
        try:
            if self._asked is None:
                address = _native.address(self._head)
                self._asked = self._channel.receive(self._peer, address, len(self._head))
            self._channel.wait([self._asked], self._watch)
        except WireError as error:
            raise self._explained(error) from error
        self._asked = None
        return Envelope.unpack(self._head)

    def _watch(self) -> None:
        """Raise if no receive waits any more, or if a receive's deadline has passed."""
        if not self._matching.is_wanted(self._peer):
            self._look_once_more()
            raise UnwantedError
        now = time.monotonic()
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            for post in self._matching.wanting(self._peer):
                self._operation = post.operation
                post.operation.check(partial(self._late, post))

    def _look_once_more(self) -> None:
        """Raise if this node has failed the last receive, so that other nodes are told."""
        if self._operation is not None and not self._matching.stopping:
            self._operation.raise_if_failed()

    def _late(self, post: PostedReceive) -> list[int]:
        """The ranks that should have sent by now."""
        if post.peer == ANY:
            return self._matching.silent(post)
        assert self._asked is not None
        return sorted(self._channel.late([self._asked]))

    def _explained(self, error: WireError) -> Exception:
        """Convert a broken connection into the error for the receives that wait."""
        lost = error.peers or (self._peer,)
        left = all(map(self._channel.left, lost))
        if left:
            with suppress(UnwantedError):  # a rank that fails also leaves, after it has told why
                self._matching.wanting(self._peer)[0].operation.await_cause()
            self._matching.leave(lost)  # no error for receives that other ranks can still serve
        self._operation = operation = self._matching.wanting(self._peer)[0].operation
        if not left:
            return operation.lost_error(error, lost)
        what = f"{operation.context.nodes.name(lost)} has closed the group while it was needed"
        return operation.error(PeerLostError, what, lost)

    # ---- messages --------------------------------------------------------------------------------

    def _deliver(self, post: PostedReceive, envelope: Envelope) -> None:
        self._post, self._operation = post, post.operation
        post.operation.use(self._channel)
        post.begin(self._peer, envelope)
        address, nbytes = post.room
        post.operation.wait([post.operation.receive(self._peer, address, nbytes)])
        post.operation.end()
        self._post = None
        post.finish(self._peer)

    def _receive_unexpected(self, waiting: SpanningOperation, envelope: Envelope) -> None:
        operation = self._operation = waiting.restarted(self._channel)
        data = np.empty(envelope.nbytes, np.uint8)
        operation.wait([operation.receive(self._peer, _native.address(data), envelope.nbytes)])
        operation.end()
        message = UnexpectedMessage(self._peer, envelope, data)
        self._post = self._matching.keep_unexpected(message)
        if self._post is not None:
            self._operation = self._post.operation
            message.deliver(self._post)
            self._post = None

    # ---- failing ---------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        operation = self._operation
        assert operation is not None
        stopping = self._matching.stopping
        failure = (
            operation.context.closed_error() if stopping else self._fail_group(operation, error)
        )
        # The error's frames hold the memory of unexpected messages.
        left = [abandon(operation.abandon, error), self._abandon_envelope()]
        self.abandoned = self.abandoned or any(left)
        if self._post is not None:
            self._post.fail(failure)
            self._post = None
        self._matching.fail(failure)

    def _abandon_envelope(self) -> bool:
        asked, self._asked = self._asked, None
        return asked is not None and abandon(lambda: self._channel.abandon([asked]), self._head)
