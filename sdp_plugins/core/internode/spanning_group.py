"""The ``Endpoint`` of a ``Group`` whose ranks are on several nodes.

On a single node the native group is the ``Endpoint``.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Any

from .. import _native
from ..errors import is_news, name_error
from ..nodes import Nodes
from ..wire_dtype import WireDType
from .algorithm_choice import explain
from .engine import END_LIMIT_S, SpanningEngine, wait_uninterrupted
from .failure_message import FailureMessage, encodable
from .group_context import GroupContext
from .leaked import leak
from .point_to_point import Messages
from .transport import Channel

_open: weakref.WeakSet[SpanningGroup] = weakref.WeakSet()


def _close_all() -> None:
    """Close the groups left open, while threads still run; an uncaught error aborts them."""
    error = getattr(sys, "last_value", None)
    for group in list(_open):
        if error is not None and is_news(error):
            group.abort(name_error(error))
        group.close()


class SpanningGroup:
    """Runs the operations of a group across nodes; its arguments are those of `GroupContext`."""

    def __init__(
        self,
        rank: int,
        nodes: Nodes,
        native: _native.NativeGroup,
        channel: Channel[Any],
        wire_dtype: WireDType | None,
    ) -> None:
        self._context = GroupContext(rank, nodes, native, channel, wire_dtype)
        self._engine = SpanningEngine(self._context)
        self._messages = Messages(self._context, self._engine.fail)
        self._closed = False
        self._pid = os.getpid()
        self.last_path = "none"
        _open.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # the last to register runs first: before the network's

    @property
    def issued(self) -> int:
        """Number of operations issued so far."""
        return self._engine.issued

    def run(self, request: _native.Request) -> None:
        """Block until the collective is done."""
        self._wait(self.submit(request), request)

    def _wait(self, work: _native.Work, request: _native.Request) -> None:
        try:
            # The engine enforces each operation's deadline; this also waits for queued operations.
            while not work.wait(request.timeout_s):
                pass
        except BaseException:
            if not work.completed():
                self._fail_interrupted(request.op)
                wait_uninterrupted(work, END_LIMIT_S)
                if not work.completed():
                    self._engine.abandoned = True
            raise

    def _fail_interrupted(self, op: _native.Op) -> None:
        failure = _native.Failure("interrupted", "interrupted by a signal", [self._context.rank])
        failure.op = op.name
        self._context.native.fail(failure)

    def submit(self, request: _native.Request) -> _native.Work:
        """Queue a collective, or post a send or a receive."""
        request.validate(self._context.rank, self._context.nodes.world_size)
        self.raise_if_failed()
        if request.op in (_native.Op.send, _native.Op.recv):
            return self._post(request)
        self.last_path = "hierarchical"
        return self._engine.submit(request)

    def _post(self, request: _native.Request) -> _native.Work:
        """Post a send or a receive; within this node it uses shared memory."""
        if request.peer in self._context.local_ranks:
            request.peer = self._context.nodes.index_of(request.peer)
            return self._context.native.submit(request)
        if request.op is _native.Op.send:
            return self._messages.send(request)
        return self._messages.receive(request)

    def explain(self, op: _native.Op, nbytes: int, registered: bool) -> str:
        """Describe the path of an operation, which does not depend on registered memory."""
        nodes = self._context.nodes
        return f"hierarchical: {nodes.count} nodes, {explain(self._context, op, nbytes)}"

    def abort(self, reason: str) -> None:
        """Fail the group on all nodes."""
        if self._closed or os.getpid() != self._pid:
            return
        text, rank = encodable(reason), self._context.rank
        self._context.native.abort(text)
        self._engine.send_failure(FailureMessage(rank, "aborted", (rank,), text))

    @property
    def failed(self) -> bool:
        """Whether the group is unusable."""
        return self._closed or self._context.native.failed

    def raise_if_failed(self) -> None:
        """Raise the error that made the group unusable, if there is one."""
        if self._closed:
            raise self._context.closed_error()
        self._context.native.raise_if_failed()

    def failure(self) -> BaseException | None:
        """The error that made the group unusable, or None."""
        return self._context.closed_error() if self._closed else self._context.native.failure()

    def release(self, held: list[Any]) -> None:
        """Empty a list of the memory that an operation has used.

        Holders of an operation's memory call this after its end. The memory is never freed if the
        network may still use it.
        """
        if self._engine.abandoned or self._messages.abandoned:
            leak(*held)
        held.clear()

    def close(self) -> None:
        """Close the group on this rank."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._engine.tell_failure()
        self._messages.stop()
        self._context.native.close()
        self._engine.close()
        ended = self._messages.close(END_LIMIT_S)
        for channel in self._context.channels.values():
            channel.close(abandon=self._engine.abandoned or not ended)
