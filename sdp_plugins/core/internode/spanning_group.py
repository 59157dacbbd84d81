"""What ``Group`` works with where its ranks are on several nodes.

It has the methods of the native group, which serves groups on one node.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from .. import _native
from ..errors import is_news, name_error
from ..nodes import Nodes
from .context import GroupContext
from .engine import END_LIMIT_S, Engine, wait_uninterrupted
from .leaked import leak
from .messages import Messages
from .notice import Notice, encodable
from .planning import explain
from .request import Piece, Request
from .wire import Channel

_open: weakref.WeakSet[SpanningGroup] = weakref.WeakSet()


def _close_all() -> None:
    """Close what the program has left open, while threads still run; others hear of an error."""
    error = getattr(sys, "last_value", None)
    for group in list(_open):
        if error is not None and is_news(error):
            group.abort(name_error(error))
        group.close()


class SpanningGroup:
    """Operations among ranks of several nodes.

    Args:
        rank: This rank.
        nodes: All ranks by node.
        native: The group of this node's ranks.
        channel: To the other nodes.
        wire_dtype: See ``GroupContext``.
    """

    def __init__(
        self,
        rank: int,
        nodes: Nodes,
        native: _native.NativeGroup,
        channel: Channel[Any],
        wire_dtype: _native.DType | None,
    ) -> None:
        self._context = GroupContext(rank, nodes, native, channel, wire_dtype)
        self._engine = Engine(self._context)
        self._messages = Messages(self._context, self._engine.fail)
        self._closed = False
        self._pid = os.getpid()
        self.last_path = "none"
        _open.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # the last to register is the first to run: before the network

    @property
    def native(self) -> _native.NativeGroup:
        """The group of this node's ranks."""
        return self._context.native

    def gone(self) -> list[int]:
        """See ``Group.gone``."""
        return self.native.gone()

    def ended(self) -> list[int]:
        """See ``Group.ended``."""
        return self.native.ended()

    @property
    def issued(self) -> int:
        """Operations so far."""
        return self._engine.issued

    def run(
        self,
        op: _native.Op,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        factor: float,
        root: int,
        sends: Sequence[Piece],
        recvs: Sequence[Piece],
        timeout_s: float,
    ) -> None:
        """Block until the collective is done."""
        work = self.submit(op, dtype, reduce_op, factor, root, sends, recvs, timeout_s)
        self._wait(work, op, timeout_s)

    def _wait(self, work: _native.Work, op: _native.Op, timeout_s: float) -> None:
        try:
            # The engine keeps each operation's deadline; this waits as long as the queue takes.
            while not work.wait(timeout_s):
                pass
        except BaseException:
            if not work.completed():
                self._fail_interrupted(op)
                wait_uninterrupted(work, END_LIMIT_S)
                if not work.completed():
                    self._engine.abandoned = True
            raise

    def _fail_interrupted(self, op: _native.Op) -> None:
        failure = _native.Failure("interrupted", "interrupted by a signal", [self._context.rank])
        failure.op = op.name
        self._context.native.fail(failure)

    def submit(
        self,
        op: _native.Op,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        factor: float,
        root: int,
        sends: Sequence[Piece],
        recvs: Sequence[Piece],
        timeout_s: float,
        layout: int = 0,
    ) -> _native.Work:
        """Queue the collective."""
        request = self._request(
            op, dtype, sends, recvs, timeout_s, reduce_op, factor, root, layout=layout
        )
        self.last_path = "hierarchical"
        return self._engine.submit(request)

    def submit_bucket(
        self,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        recvs: Sequence[Piece],
        timeout_s: float,
        layout: int,
    ) -> _native.Work:
        """Queue a fusion buffer."""
        op = _native.Op.all_reduce
        return self.submit(op, dtype, reduce_op, 1.0, -1, (), recvs, timeout_s, layout)

    def all_reduce(
        self,
        address: int,
        count: int,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        timeout_s: float,
    ) -> None:
        """Run the most frequent call."""
        op = _native.Op.all_reduce
        self.run(op, dtype, reduce_op, 1.0, -1, (), ((address, count),), timeout_s)

    def send(
        self, address: int, count: int, dtype: _native.DType, peer: int, tag: int, timeout_s: float
    ) -> _native.Work:
        """Send to a rank; on this node through shared memory."""
        op, piece = _native.Op.send, (address, count)
        request = self._request(op, dtype, (piece,), (), timeout_s, peer=peer, tag=tag)
        if peer not in self._context.local_ranks:
            return self._messages.send(request)
        index = self._context.nodes.index_of(peer)
        return self._context.native.send(address, count, dtype, index, tag, timeout_s)

    def recv(
        self, address: int, count: int, dtype: _native.DType, peer: int, tag: int, timeout_s: float
    ) -> _native.Work:
        """Receive from a rank, or from any."""
        op, piece = _native.Op.recv, (address, count)
        request = self._request(op, dtype, (), (piece,), timeout_s, peer=peer, tag=tag)
        if peer not in self._context.local_ranks:
            return self._messages.receive(request)
        index = self._context.nodes.index_of(peer)
        return self._context.native.recv(address, count, dtype, index, tag, timeout_s)

    def _request(
        self,
        op: _native.Op,
        dtype: _native.DType,
        sends: Sequence[Piece],
        recvs: Sequence[Piece],
        timeout_s: float,
        reduce_op: _native.ReduceOp = _native.ReduceOp.sum,
        factor: float = 1.0,
        root: int = -1,
        *,
        layout: int = 0,
        peer: int = -1,
        tag: int = 0,
    ) -> Request:
        """Check a call, as far as this rank can."""
        context = self._context
        signature = _native.signature(
            op,
            dtype,
            reduce_op,
            root,
            list(sends),
            list(recvs),
            timeout_s,
            context.rank,
            context.nodes.world_size,
            peer,
            tag,
            layout,
        )
        self._raise_if_failed()
        return Request(
            op,
            dtype,
            reduce_op,
            factor,
            root,
            tuple(sends),
            tuple(recvs),
            timeout_s,
            layout=layout,
            peer=peer,
            tag=tag,
            signature=signature,
        )

    def explain(self, op: str, nbytes: int) -> str:
        """Say how an operation travels."""
        nodes = self._context.nodes
        return f"hierarchical: {nodes.count} nodes, {explain(self._context, op, nbytes)}"

    def add_region(self, ptr: int, nbytes: int, fd: int, offset: int) -> int:
        """Offer memory to the ranks of this node."""
        return self._context.native.add_region(ptr, nbytes, fd, offset)

    def remove_region(self, region: int) -> None:
        """Take it back."""
        self._context.native.remove_region(region)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Memory that the ranks of this node can map."""
        return self._context.native.allocate(nbytes)

    def release(self, region: int) -> None:
        """Free it."""
        self._context.native.release(region)

    def abort(self, reason: str) -> None:
        """Fail the group on all nodes."""
        if self._closed or os.getpid() != self._pid:
            return
        text, rank = encodable(reason), self._context.rank
        self._context.native.abort(text)
        self._engine.tell(Notice(rank, "aborted", (rank,), text))

    @property
    def failed(self) -> bool:
        """Whether the group is unusable."""
        return self._closed or self._context.native.failed

    def raise_if_failed(self) -> None:
        """Raise why the group is unusable."""
        self._raise_if_failed()

    def failure(self) -> BaseException | None:
        """Why the group is unusable, or None."""
        return self._context.closed_error() if self._closed else self._context.native.failure()

    def let_go(self, held: list[Any]) -> None:
        """Empty a list of what an operation has used, as far as the network has let go of it.

        Whoever holds an operation's memory gives it up by this, when the operation has ended.
        """
        if self._engine.abandoned or self._messages.abandoned:
            leak(*held)
        held.clear()

    def close(self) -> None:
        """Leave the group."""
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

    def _raise_if_failed(self) -> None:
        if self._closed:
            raise self._context.closed_error()
        self._context.native.raise_if_failed()
