"""How the values of a reduction look between nodes."""

from __future__ import annotations

from .. import _native
from .operation import Operation

DType = _native.DType


class WireFormat:
    """How values of this operation look on the wire: partial sums, and results.

    Partial sums are the accumulators of the native reductions, so that nothing is rounded twice;
    with a `wire_dtype` those of float32 and of 16-bit floats are 16-bit, and float32's results too.

    Args:
        operation: The operation.
        as_it_is: Whatever the group's `wire_dtype` is.
    """

    def __init__(self, operation: Operation, *, as_it_is: bool = False) -> None:
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
        # Whether partial sums of a single rank are its values as they lie; a bool may lie there as
        # any byte.
        self.sums_are_values = (
            self.accumulator_size == operation.itemsize
            and self.op is not _native.ReduceOp.premul_sum
            and self.dtype is not DType.bool
        )

    def pack(self, target: int, accumulators: int, count: int) -> int:
        """Make partial sums ready for the wire; returns where they are."""
        if self.wire is None:
            return accumulators
        _native.narrow(self.wire, target, accumulators, count)
        return target

    def fold(self, partials: list[int], target: int, count: int) -> None:
        """Sum partial sums, into partial sums of more nodes; they are not narrowed."""
        _native.combine(self.dtype, self.op, partials, target, count, 0, True, True)

    def total(self, partials: list[int], target: int, count: int) -> None:
        """Sum what stands for all nodes, in their order, into results as on the wire."""
        sums = self.wire is None  # else rounded ones: elements of the wire's type
        dtype = self.dtype if self.wire is None else self.wire
        _native.combine(dtype, self.op, partials, target, count, self.world_size, sums, False)

    def widen(self, target: int, results: int, count: int) -> None:
        """Make float32 of narrowed results."""
        assert self.wire is not None
        _native.widen(self.wire, target, results, count)
