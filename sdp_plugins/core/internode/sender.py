"""Sends messages to a rank of another node."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .. import _native
from ..errors import SdpError
from .issued import IssuedOperation
from .leaked import abandon
from .operation import FailGroup
from .posted import Envelope
from .transport import Channel


class Sender:
    """A thread that sends to one rank, one message after another; starts with the first.

    It has the channel for itself.
    """

    def __init__(self, peer: int, channel: Channel[Any], fail: FailGroup) -> None:
        self.channel = channel
        self._name = f"sdp-send-{peer}"
        self._fail = fail
        self._posts: deque[IssuedOperation] = deque()
        self._changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self._stopping = False
        self.abandoned = False
        """Whether messages were in flight when one failed."""

    def post(self, post: IssuedOperation) -> None:
        """Queue a send."""
        with self._changed:
            if self._stopping:
                raise post.operation.context.closed_error()
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self.thread.start()
            self._posts.append(post)
            self._changed.notify()

    def stop(self) -> None:
        """Have the thread end once its current send has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _loop(self) -> None:
        failure: SdpError | None = None
        while (post := self._next()) is not None:
            failure = failure or self._failure_of(post)
            if failure is not None:
                post.fail(failure)

    def _next(self) -> IssuedOperation | None:
        with self._changed:
            while not self._posts and not self._stopping:
                self._changed.wait()
            return self._posts.popleft() if self._posts else None

    def _failure_of(self, post: IssuedOperation) -> SdpError | None:
        """Carry out a send; returns its failure, if it fails."""
        post.start()
        try:
            self._send(post)
            post.operation.end()
        except BaseException as error:
            return self._fail_post(post, error)
        return None

    def _fail_post(self, post: IssuedOperation, error: BaseException) -> SdpError:
        failure = self._fail(post.operation, error)
        self.abandoned = abandon(post.operation.abandon, error)  # its frames hold the envelope
        return failure

    def _send(self, post: IssuedOperation) -> None:
        operation, ((address, count),) = post.operation, post.operation.request.sends
        nbytes, request = count * operation.itemsize, operation.request
        head = Envelope(nbytes, int(request.dtype), request.tag).pack()
        operation.wait(
            [
                operation.send(request.peer, _native.address(head), len(head)),
                operation.send(request.peer, address, nbytes),
            ]
        )
        post.finish()
