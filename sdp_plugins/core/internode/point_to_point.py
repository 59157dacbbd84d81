"""send and recv between nodes."""

from __future__ import annotations

import threading
from typing import Any

from .. import _native
from ..errors import SdpError
from .group_context import GroupContext
from .issued import IssuedOperation
from .matching import SpanningMatching
from .operation import FailGroup, SpanningOperation
from .posted import ANY, PostedAnyReceive, PostedReceive, UnexpectedMessage
from .receiver import Receiver
from .sender import Sender
from .transport import Channel, Stream


class Messages:
    """All sends and receives of a group with ranks of other nodes."""

    def __init__(self, context: GroupContext, fail: FailGroup) -> None:
        self._context = context
        self._fail = fail
        self._seq = 0
        self._matching = SpanningMatching(context)
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._channels: list[Channel[Any]] = []

    def send(self, request: _native.Request) -> _native.Work:
        """Queue a send."""
        with self._matching.lock:
            operation = self._operation(request)
            sender = self._sender(request.peer)
            operation.use(sender.channel)
            post = IssuedOperation(operation)
            request.work = post.work
            sender.post(post)
        return post.work

    def receive(self, request: _native.Request) -> _native.Work:
        """Post a receive; one from any rank is posted within this node as well."""
        with self._matching.lock:
            operation = self._operation(request)
            post = self._from_any(operation) if request.peer == ANY else PostedReceive(operation)
            request.work = post.work
            message = self._matching.add(post)
            for peer in self._context.remote_ranks if request.peer == ANY else (request.peer,):
                self._start_receiver(peer)
        if message is not None:
            self._deliver(message, post)
        return post.work

    def _deliver(self, message: UnexpectedMessage, post: PostedReceive) -> None:
        try:
            message.deliver(post)
        except BaseException as error:
            failure = self._fail(post.operation, error)
            post.fail(failure)
            self._matching.fail(failure)

    def _operation(self, request: _native.Request) -> SpanningOperation:
        if self._matching.stopping:
            raise self._context.closed_error()
        self._seq += 1
        return SpanningOperation(self._context, request, self._seq)

    def _from_any(self, operation: SpanningOperation) -> PostedAnyReceive:
        operation.request.seq = operation.seq
        try:
            work = self._context.native.submit(operation.request)
        except SdpError as error:
            self._fail(operation, error)  # its message does not fit: tells the other nodes
            raise
        return PostedAnyReceive(operation, work)

    @property
    def abandoned(self) -> bool:
        """Whether messages were in flight when one failed."""
        return any(end.abandoned for end in self._ends())

    def stop(self) -> None:
        """Have all threads end; no message can be posted afterwards."""
        with self._matching.lock:
            self._matching.stop()
            for sender in self._senders.values():
                sender.stop()

    def close(self, limit_s: float) -> bool:
        """Wait for all threads; returns whether they have ended with no message in flight."""
        threads = [end.thread for end in self._ends() if end.thread is not None]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(limit_s)
        ended = not any(thread.is_alive() for thread in threads)
        if ended:
            for receiver in self._receivers.values():
                receiver.withdraw()
        ended = ended and not self.abandoned
        for channel in self._channels:
            channel.close(abandon=not ended)
        return ended

    def _ends(self) -> list[Sender | Receiver]:
        """A copy, made without the lock: a forked child may call this."""
        return [*self._senders.values(), *self._receivers.values()]

    def _branch(self) -> Channel[Any]:
        self._channels.append(self._context.channel.branch(Stream.point_to_point))
        return self._channels[-1]

    def _sender(self, peer: int) -> Sender:
        if peer not in self._senders:
            self._senders[peer] = Sender(peer, self._branch(), self._fail)
        return self._senders[peer]

    def _start_receiver(self, peer: int) -> None:
        if peer not in self._receivers:
            self._receivers[peer] = Receiver(peer, self._matching, self._branch(), self._fail)
