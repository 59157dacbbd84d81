"""The format of a reduction's values between nodes."""

from __future__ import annotations

from .. import _native
from ..wire_dtype import WireDType
from ..wire_encoding import PIECE, Encoding, Half, Unchanged, encoding_of
from .operation import SpanningOperation

DType, Op, ReduceOp = _native.DType, _native.Op, _native.ReduceOp
EXACT_NBYTES = 16 * 1024
"""Largest buffer that is not rounded for the wire.

The limit is fixed and does not depend on costs, because rounding changes the result.
"""
_SUMS = (ReduceOp.sum, ReduceOp.avg, ReduceOp.premul_sum)
_HALVES = (DType.float16, DType.bfloat16)


class WireFormat:
    """Format of an operation's partial sums and results on the wire.

    Partial sums are the accumulators of the native reductions, so that no value is rounded twice.
    With a ``wire_dtype``, the partial sums of other nodes, and then the results, are rounded to it,
    unless the buffer is small.

    Attributes:
        accumulator_size: Bytes of an accumulator.
        sums: How partial sums travel.
        results: How results travel.
        rounds: Whether anything is rounded for the wire.
        sums_are_values: Whether the values of a single rank are valid partial sums; a bool is not,
            because any nonzero byte is true.
    """

    def __init__(self, operation: SpanningOperation) -> None:
        request, context = operation.request, operation.context
        self._operation = operation
        self.dtype, self.op = request.dtype, request.reduce_op
        self.world_size = context.nodes.world_size
        self.accumulator_size = _native.accumulator_size(request.dtype, request.reduce_op)
        self.sums: Encoding = Unchanged(self.accumulator_size)
        self.results: Encoding = Unchanged(operation.itemsize)
        self._feeds_back = False
        nbytes = request.count * operation.itemsize
        if request.op is Op.reduce_scatter:
            nbytes *= self.world_size
        if context.wire_dtype is not None and nbytes > EXACT_NBYTES:
            self._round(context.wire_dtype)
        self.rounds = self.sums.rounds
        self.sums_are_values = (
            self.accumulator_size == operation.itemsize
            and self.op is not ReduceOp.premul_sum
            and self.dtype is not DType.bool
        )

    def _round(self, wire_dtype: WireDType) -> None:
        if self.dtype in _HALVES:  # whose accumulators are float32
            self.sums = Half(self.dtype)
        elif self.dtype is DType.float32 and (self.op in _SUMS or not wire_dtype.has_blocks):
            self.sums = self.results = encoding_of(wire_dtype)
            self._feeds_back = wire_dtype.feedback

    def pack(self, encoding: Encoding, target: int, source: int, count: int, part: int) -> None:
        """Round a part of this rank's sums or results for the wire.

        Args:
            encoding: Of sums or of results.
            target: Address of the bytes.
            source: Address of the values.
            count: Number of values.
            part: Tells the part from the others that this rank rounds in the operation.
        """
        request, context = self._operation.request, self._operation.context
        residual = 0
        if self._feeds_back:
            ((address, _), *_) = request.sends or request.recvs
            call = int(request.op), int(request.reduce_op), request.count
            residual = context.residuals.address((address, *call, part, count), count)
        encoding.pack(target, source, count, residual, (self._operation.seq, context.rank, part))

    def fold(self, partials: list[int], target: int, count: int) -> None:
        """Add partial sums of several nodes into one, which stays an accumulator."""
        _native.combine(self.dtype, self.op, partials, target, count, 0, True, True)

    def total(self, partials: list[int], target: int, count: int) -> None:
        """Add the partial sums of all nodes, in node order, into results."""
        _native.combine(self.dtype, self.op, partials, target, count, self.world_size, True, False)

    def total_received(self, partials: list[int], own: int, target: int, count: int) -> None:
        """Add the partial sums of all nodes, those of other nodes as they have arrived.

        Args:
            partials: Addresses of the sums of all nodes.
            own: Index of this node's own, which were not rounded.
            target: Address of the results, which may be that of this node's own sums.
            count: Number of values.
        """
        if not self.rounds:
            self.total(partials, target, count)
            return
        size, length = self.accumulator_size, min(count, PIECE)
        room = self._operation.context.scratch("widened", len(partials) * length * size)
        sums = [room + index * length * size for index in range(len(partials))]
        for begin in range(0, count, PIECE):
            part = min(PIECE, count - begin)
            for index, partial in enumerate(partials):
                if index != own:
                    self.sums.unpack(sums[index], partial + self.sums.nbytes(begin), part)
            sums[own] = partials[own] + begin * size
            self.total(sums, target + begin * self._operation.itemsize, part)
