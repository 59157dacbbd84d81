"""The format of a reduction's values between nodes."""

from __future__ import annotations

from .. import _native
from .operation import SpanningOperation

DType = _native.DType


class WireFormat:
    """Format of an operation's partial sums and results on the wire.

    Partial sums are the accumulators of the native reductions, so that no value is rounded twice.
    With a `wire_dtype`, partial sums of float32 and of 16-bit floats are 16-bit values, and so are
    the results of float32; `as_it_is` ignores the `wire_dtype`.
    """

    def __init__(self, operation: SpanningOperation, *, as_it_is: bool = False) -> None:
        request = operation.request
        self.dtype, self.op = request.dtype, request.reduce_op
        self.world_size = operation.context.nodes.world_size
        self.accumulator_size = _native.accumulator_size(request.dtype, request.reduce_op)
        self.wire = None
        if operation.context.wire_dtype is not None and not as_it_is:
            if request.dtype is DType.float32:
                self.wire = operation.context.wire_dtype
            elif request.dtype in (DType.float16, DType.bfloat16):
                self.wire = request.dtype
        self.partial_size = self.accumulator_size if self.wire is None else 2
        self.narrows_results = self.wire is not None and request.dtype is DType.float32
        self.result_size = 2 if self.narrows_results else operation.itemsize
        # Whether the values of a single rank are valid partial sums; a bool is not, because any
        # nonzero byte is true.
        self.sums_are_values = (
            self.accumulator_size == operation.itemsize
            and self.op is not _native.ReduceOp.premul_sum
            and self.dtype is not DType.bool
        )

    def pack(self, target: int, accumulators: int, count: int) -> int:
        """Convert partial sums for the wire; returns their address."""
        if self.wire is None:
            return accumulators
        _native.narrow(self.wire, target, accumulators, count)
        return target

    def fold(self, partials: list[int], target: int, count: int) -> None:
        """Add partial sums of several nodes into one, which stays an accumulator."""
        _native.combine(self.dtype, self.op, partials, target, count, 0, True, True)

    def total(self, partials: list[int], target: int, count: int) -> None:
        """Add the partial sums of all nodes, in node order, into results in the wire's format."""
        sums = self.wire is None  # else they are rounded: elements of the wire's type
        dtype = self.dtype if self.wire is None else self.wire
        _native.combine(dtype, self.op, partials, target, count, self.world_size, sums, False)

    def widen(self, target: int, results: int, count: int) -> None:
        """Convert narrowed results to float32."""
        assert self.wire is not None
        _native.widen(self.wire, target, results, count)
