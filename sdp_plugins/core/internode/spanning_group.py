"""What ``Group`` works with where its ranks are on several nodes; the counterpart of the native
group of one node, with the same methods."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import _native
from ..nodes import Nodes
from .call import Here, Piece, Request
from .engine import END_LIMIT_S, Engine, closed, wait_uninterrupted
from .notice import Notice
from .wire import Channel
from .work import Work

_NO_OP = _native.ReduceOp.sum


class SpanningGroup:
    """Operations among ranks of several nodes.

    Args:
        rank: This rank.
        nodes: All ranks by node.
        native: The group of this node's ranks.
        channel: To the other nodes.
        wire_dtype: See ``Here``.
    """

    def __init__(
        self,
        rank: int,
        nodes: Nodes,
        native: _native.NativeGroup,
        channel: Channel,
        wire_dtype: _native.DType | None,
    ) -> None:
        self._here = Here(rank, nodes, native, channel, wire_dtype)
        self._engine = Engine(self._here)
        self._closed = False
        self._pid = os.getpid()
        self.last_path = "none"

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
        try:
            work.wait(float("inf"))
        except BaseException as error:
            if work.completed() and work.failure() is error:
                raise
            what = f"{op.name}: interrupted by a signal"
            self._fail("aborted", f"{what}. Hint: make a new group.")
            wait_uninterrupted(work, END_LIMIT_S)
            raise

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
    ) -> Work:
        """Queue the collective."""
        here = self._here
        shape = _native.describe(
            op,
            dtype,
            reduce_op,
            root,
            list(sends),
            list(recvs),
            timeout_s,
            here.rank,
            here.nodes.world_size,
        )
        self._raise_if_failed()
        request = Request(
            op,
            dtype,
            reduce_op,
            factor,
            root,
            tuple(sends),
            tuple(recvs),
            timeout_s,
            layout=layout,
            shape=shape,
        )
        self.last_path = "hierarchical"
        return self._engine.submit(request)

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
        """Send to a rank of this node."""
        return self._here.native.send(
            address, count, dtype, self._local("send", peer), tag, timeout_s
        )

    def recv(
        self, address: int, count: int, dtype: _native.DType, peer: int, tag: int, timeout_s: float
    ) -> _native.Work:
        """Receive from a rank of this node."""
        return self._here.native.recv(
            address, count, dtype, self._local("recv", peer), tag, timeout_s
        )

    def _local(self, what: str, peer: int) -> int:
        if peer not in self._here.local:
            raise NotImplementedError(
                f"{what}: point-to-point between nodes is not there yet (rank {peer}). "
                "Hint: use a group of the ranks of one node."
            )
        return self._here.nodes.index_of(peer)

    def add_region(self, ptr: int, nbytes: int, fd: int, offset: int) -> int:
        """Offer memory to the ranks of this node."""
        return self._here.native.add_region(ptr, nbytes, fd, offset)

    def remove_region(self, region: int) -> None:
        """Take it back."""
        self._here.native.remove_region(region)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Memory that the ranks of this node can map."""
        return self._here.native.allocate(nbytes)

    def release(self, region: int) -> None:
        """Free it."""
        self._here.native.release(region)

    def abort(self, reason: str) -> None:
        """Fail the group on all nodes."""
        self._here.native.abort(reason)
        self._engine.tell(Notice(self._here.rank, "aborted", (self._here.rank,), reason))

    def failure(self) -> BaseException | None:
        """Why the group is unusable, or None."""
        return closed(self._here) if self._closed else self._here.native.failure()

    def close(self) -> None:
        """Leave the group."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._here.native.close()
        self._engine.close()
        self._here.channel.close(abandon=self._engine.abandoned)

    def _raise_if_failed(self) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure

    def _fail(self, kind: str, what: str) -> None:
        here = self._here
        head = f"[rank {here.rank}/{here.nodes.world_size}] "
        here.native.fail(kind, head + what, [here.rank], "", 0, 0.0)
