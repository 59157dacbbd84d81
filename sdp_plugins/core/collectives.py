"""The operations of a group."""

from __future__ import annotations

from collections.abc import Sequence

from . import _native
from .buffers import Buffer, BufferLike, as_buffer
from .dtypes import ReduceOp
from .in_flight import Issuer
from .work import Work

Op = _native.Op
_ALL_REDUCE, _BARRIER = Op.all_reduce, Op.barrier  # an enumeration's attributes are slow


class Collectives:
    """Collectives, and sends and receives, of one rank; see ``Group``."""

    def __init__(self, issuer: Issuer, rank: int, world_size: int) -> None:
        self.issuer = issuer
        self.rank = rank
        self.world_size = world_size

    @property
    def timeout_s(self) -> float:
        """Time-out of operations that give none, in seconds; may be changed."""
        return self.issuer.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.issuer.timeout_s = seconds

    # ---- collectives ---------------------------------------------------------------------------

    def all_reduce(
        self,
        buffer: BufferLike,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' buffers, in place, on all ranks."""
        target = as_buffer(buffer)
        reduction = op if type(op) is ReduceOp else ReduceOp.parse(op)
        request = self.issuer.in_place(_ALL_REDUCE, target, timeout_s, reduction)
        return self.issuer.issue(request, (target,), async_op)

    def all_reduce_at_flags(
        self,
        pieces: Sequence[Buffer],
        op: ReduceOp,
        flags: Sequence[tuple[int, int, int]],
        timeout_s: float | None = None,
    ) -> Work:
        """``all_reduce`` of pieces of memory that a device, such as a GPU, starts and waits for.

        Each piece is an operation. It starts when the device has written ``value`` at ``ready``,
        and stores ``value`` at ``done`` at its end, however it ends. After a failure it still waits
        for the device, and every byte of the piece is 0xFF then, so that floating-point numbers are
        NaN. The handle is done soon after the last ``done`` is stored; ``failure`` of the group
        says it earlier. A group that is closed waits for two seconds at most.

        Args:
            pieces: Memory that the host can access, of one type.
            op: The reduction.
            flags: ``(ready, done, value)`` of each piece: addresses of two 32-bit words, which must
                stay valid until the handle is done, and the value. It may wrap around: a word has
                come to it if ``(int32_t)(word - value) >= 0``.
            timeout_s: How long each piece waits for the device, and then for the other ranks.

        Raises:
            NotImplementedError: The group spans several nodes.
        """
        if self.issuer.submit_across_nodes is not None:
            raise NotImplementedError(
                "all_reduce_at_flags: the group spans several nodes. Hint: synchronize with the "
                "device and call all_reduce."
            )
        call = self.issuer.collective(_ALL_REDUCE, (), pieces, timeout_s, op)
        return self.issuer.submit(*call, flags)

    def reduce(
        self,
        buffer: BufferLike,
        root: int,
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' buffers into the root's; the others' stay as they are."""
        target = as_buffer(buffer)
        request = self.issuer.in_place(Op.reduce, target, timeout_s, ReduceOp.parse(op), root)
        return self.issuer.issue(request, (target,), async_op)

    def broadcast(
        self,
        buffer: BufferLike,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Copy the root's buffer into all others."""
        target = as_buffer(buffer, writable=self.rank != root)
        request = self.issuer.in_place(Op.broadcast, target, timeout_s, root=root)
        return self.issuer.issue(request, (target,), async_op)

    def all_gather(
        self,
        output: BufferLike,
        input: BufferLike,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs, in rank order, in one output ``world_size`` times as large."""
        source = as_buffer(input, writable=False)
        target = as_buffer(output)
        self._check_size("all_gather: the output", target, self.world_size * source.count)
        parts = target.split([source.count] * self.world_size)
        call = self.issuer.collective(Op.all_gather, (source,), parts, timeout_s)
        return self.issuer.issue(*call, async_op)

    def all_gather_uneven(
        self,
        outputs: Sequence[BufferLike],
        input: BufferLike,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs, one output per rank; sizes may differ between ranks."""
        source = as_buffer(input, writable=False)
        targets = [as_buffer(output) for output in outputs]
        call = self.issuer.collective(Op.all_gather, (source,), targets, timeout_s)
        return self.issuer.issue(*call, async_op)

    def reduce_scatter(
        self,
        output: BufferLike,
        input: BufferLike | Sequence[Buffer],
        op: ReduceOp | str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Combine all ranks' inputs and keep this rank's part.

        Args:
            output: This rank's part of the result.
            input: ``world_size`` times the output's size in rank order, or a list of ``Buffer``,
                one per rank, each of the output's size.
            op: The reduction.
            async_op: See the class.
            timeout_s: See the class.
        """
        target = as_buffer(output)
        if isinstance(input, (list, tuple)):
            sources = [as_buffer(part, writable=False) for part in input]
        else:
            whole = as_buffer(input, writable=False)
            self._check_size("reduce_scatter: the input", whole, self.world_size * target.count)
            sources = whole.split([target.count] * self.world_size)
        reduction = ReduceOp.parse(op)
        call = self.issuer.collective(Op.reduce_scatter, sources, (target,), timeout_s, reduction)
        return self.issuer.issue(*call, async_op)

    def gather(
        self,
        outputs: Sequence[BufferLike] | None,
        input: BufferLike,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Collect all ranks' inputs at the root: one output per rank there, None elsewhere."""
        source = as_buffer(input, writable=False)
        targets = [as_buffer(output) for output in outputs or ()]
        call = self.issuer.collective(Op.gather, (source,), targets, timeout_s, root=root)
        return self.issuer.issue(*call, async_op)

    def scatter(
        self,
        output: BufferLike,
        inputs: Sequence[BufferLike] | None,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Hand out the root's inputs, one per rank (None elsewhere)."""
        target = as_buffer(output)
        sources = [as_buffer(part, writable=False) for part in inputs or ()]
        call = self.issuer.collective(Op.scatter, sources, (target,), timeout_s, root=root)
        return self.issuer.issue(*call, async_op)

    def all_to_all(
        self,
        output: BufferLike,
        input: BufferLike,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send a part of the input to each rank and receive a part of each.

        Args:
            output: Receives the ranks' parts, in rank order.
            input: Holds the parts for the ranks, in rank order.
            output_splits: Elements from each rank; None: equal parts.
            input_splits: Elements for each rank; None: equal parts.
            async_op: See the class.
            timeout_s: See the class.
        """
        targets = self._parts("all_to_all: the output", as_buffer(output), output_splits)
        whole = as_buffer(input, writable=False)
        sources = self._parts("all_to_all: the input", whole, input_splits)
        call = self.issuer.collective(Op.all_to_all, sources, targets, timeout_s)
        return self.issuer.issue(*call, async_op)

    def all_to_all_pieces(
        self,
        outputs: Sequence[BufferLike],
        inputs: Sequence[BufferLike],
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """``all_to_all`` with one buffer per rank on each side."""
        targets = [as_buffer(output) for output in outputs]
        sources = [as_buffer(part, writable=False) for part in inputs]
        call = self.issuer.collective(Op.all_to_all, sources, targets, timeout_s)
        return self.issuer.issue(*call, async_op)

    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Wait until all ranks are here."""
        call = self.issuer.collective(_BARRIER, (), (), timeout_s)
        return self.issuer.issue(*call, async_op)

    # ---- point to point ------------------------------------------------------------------------

    def send(
        self,
        buffer: BufferLike,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Send to one rank. Done when the receiver, or the channel to it, has taken the bytes."""
        source = as_buffer(buffer, writable=False)
        request = self.issuer.message(Op.send, source, dst, tag, timeout_s)
        work = self.issuer.submit(request, (source,))
        if async_op:
            return work
        work.wait()
        return None

    def recv(
        self,
        buffer: BufferLike,
        src: int | None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Work:
        """Receive from one rank, or from any (``src=None``); ``Work.source_rank`` tells which.

        Messages of one sender match in order, by tag.
        """
        target = as_buffer(buffer)
        if src is not None and src < 0:  # to the native core, -1 is any rank
            raise ValueError(
                f"recv: source {src} is not another rank of this group of {self.world_size}"
            )
        peer = -1 if src is None else src
        request = self.issuer.message(Op.recv, target, peer, tag, timeout_s)
        work = self.issuer.submit(request, (target,))
        if not async_op:
            work.wait()
        return work

    # ---- checking ------------------------------------------------------------------------------

    def _check_size(self, what: str, buffer: Buffer, count: int) -> None:
        if buffer.count != count:
            raise ValueError(
                f"{what} has {buffer.count} elements, but {count} are needed in a group of "
                f"{self.world_size}"
            )

    def _parts(self, what: str, whole: Buffer, splits: Sequence[int] | None) -> list[Buffer]:
        if splits is None:
            if whole.count % self.world_size:
                raise ValueError(
                    f"{what} has {whole.count} elements, which {self.world_size} ranks cannot "
                    "share equally. Hint: give the splits."
                )
            splits = [whole.count // self.world_size] * self.world_size
        if len(splits) != self.world_size or min(splits) < 0 or sum(splits) != whole.count:
            raise ValueError(
                f"{what} has {whole.count} elements, but its splits are {list(splits)} for "
                f"{self.world_size} ranks"
            )
        return whole.split(splits)
