"""The format of a reduction's values between nodes."""

from __future__ import annotations

from .. import _native
from ..wire_dtype import WireDType
from ..wire_encoding import Encoding, Half, Unchanged, encoding_of
from .operation import SpanningOperation

DType, ReduceOp = _native.DType, _native.ReduceOp
_SUMS = (ReduceOp.sum, ReduceOp.avg, ReduceOp.premul_sum)
_HALVES = (DType.float16, DType.bfloat16)


class WireFormat:
    """Format of an operation's partial sums and results on the wire.

    Partial sums are the accumulators of the native reductions, so that no value is rounded twice.
    With a ``wire_dtype``, the partial sums of other nodes, and then the results, are rounded to it.

    Args:
        operation: The operation.
        as_it_is: Whether to ignore the group's ``wire_dtype``.

    Attributes:
        accumulator_size: Bytes of an accumulator.
        sums: How partial sums travel.
        results: How results travel.
        rounds: Whether anything is rounded for the wire.
        feeds_back: Whether what rounding leaves out is kept.
        sums_are_values: Whether the values of a single rank are valid partial sums; a bool is not,
            because any nonzero byte is true.
    """

    def __init__(self, operation: SpanningOperation, *, as_it_is: bool = False) -> None:
        request, context = operation.request, operation.context
        self.dtype, self.op = request.dtype, request.reduce_op
        self.world_size = context.nodes.world_size
        self.accumulator_size = _native.accumulator_size(request.dtype, request.reduce_op)
        self.sums: Encoding = Unchanged(self.accumulator_size)
        self.results: Encoding = Unchanged(operation.itemsize)
        self.feeds_back = False
        if context.wire_dtype is not None and not as_it_is:
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
            self.feeds_back = wire_dtype.feedback

    def fold(self, partials: list[int], target: int, count: int) -> None:
        """Add partial sums of several nodes into one, which stays an accumulator."""
        _native.combine(self.dtype, self.op, partials, target, count, 0, True, True)

    def total(self, partials: list[int], target: int, count: int) -> None:
        """Add the partial sums of all nodes, in node order, into results."""
        _native.combine(self.dtype, self.op, partials, target, count, self.world_size, True, False)
