"""The format of a reduction's values between nodes."""

from __future__ import annotations

import struct
import zlib

from .. import _native
from ..wire_dtype import WireDType
from .operation import SpanningOperation

DType, ReduceOp = _native.DType, _native.ReduceOp
_SUMS = (ReduceOp.sum, ReduceOp.avg, ReduceOp.premul_sum)
_HALVES = (DType.float16, DType.bfloat16)
_FLOAT32 = 4


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
        if context.wire_dtype is not None and not as_it_is:
            self._round(operation, context.wire_dtype)
        self.rounds = self.sums.rounds
        self.sums_are_values = (
            self.accumulator_size == operation.itemsize
            and self.op is not ReduceOp.premul_sum
            and self.dtype is not DType.bool
        )

    def _round(self, operation: SpanningOperation, wire_dtype: WireDType) -> None:
        if self.dtype in _HALVES:  # whose accumulators are float32
            self.sums = Half(self.dtype)
        elif self.dtype is DType.float32 and not wire_dtype.has_blocks:
            self.sums = self.results = Half(DType[wire_dtype.name])
        elif self.dtype is DType.float32 and self.op in _SUMS:
            self.sums = self.results = Blocks(operation, wire_dtype)

    def fold(self, partials: list[int], target: int, count: int) -> None:
        """Add partial sums of several nodes into one, which stays an accumulator."""
        _native.combine(self.dtype, self.op, partials, target, count, 0, True, True)

    def total(self, partials: list[int], target: int, count: int) -> None:
        """Add the partial sums of all nodes, in node order, into results."""
        _native.combine(self.dtype, self.op, partials, target, count, self.world_size, True, False)


class Encoding:
    """How elements, or accumulators, become bytes on the wire.

    Attributes:
        rounds: Whether they are changed.
    """

    rounds = True

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        raise NotImplementedError

    def offset(self, begin: int, part: int) -> int:
        """Bytes from the first part of a sequence to this one, which begins at this element."""
        raise NotImplementedError

    def pack(self, target: int, source: int, count: int, residual: int = 0, key: int = 0) -> None:
        """Convert for the wire.

        Args:
            target: Address of the bytes.
            source: Address of the values.
            count: Number of values.
            residual: Address of what earlier roundings have left out of these values; 0: of none.
            key: Makes random numbers different from those of other calls.
        """
        raise NotImplementedError

    def unpack(self, target: int, source: int, count: int) -> None:
        """Convert back."""
        raise NotImplementedError


class Unchanged(Encoding):
    """Values as they are."""

    rounds = False

    def __init__(self, size: int) -> None:
        self._size = size

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        return count * self._size

    def offset(self, begin: int, part: int) -> int:
        """Bytes in front of a part."""
        return begin * self._size


class Half(Encoding):
    """Values of float32, rounded to a 16-bit type."""

    def __init__(self, dtype: _native.DType) -> None:
        self._dtype = dtype

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        return 2 * count

    def offset(self, begin: int, part: int) -> int:
        """Bytes in front of a part."""
        return 2 * begin

    def pack(self, target: int, source: int, count: int, residual: int = 0, key: int = 0) -> None:
        """Round."""
        _native.narrow(self._dtype, target, source, count)

    def unpack(self, target: int, source: int, count: int) -> None:
        """Widen."""
        _native.widen(self._dtype, target, source, count)


class Blocks(Encoding):
    """Values of float32, rounded to 8 bits, with a scale for each block of 256."""

    def __init__(self, operation: SpanningOperation, wire_dtype: WireDType) -> None:
        self._format = _native.BlockFormat[wire_dtype.name]
        self._seed = wire_dtype.seed
        self._call = operation.seq, operation.context.rank

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        return _native.blocks_nbytes(count)

    def offset(self, begin: int, part: int) -> int:
        """Bytes in front of a part; a block that is cut by its begin has two scales."""
        return _native.blocks_nbytes(begin) + part * _FLOAT32

    def pack(self, target: int, source: int, count: int, residual: int = 0, key: int = 0) -> None:
        """Round; with a seed stochastically, and in the same way in every run."""
        seed = self._seed
        if seed is not None:
            seed = zlib.crc32(struct.pack("<4Q", seed, *self._call, key))
        _native.pack_blocks(self._format, target, source, count, residual, seed)

    def unpack(self, target: int, source: int, count: int) -> None:
        """Widen."""
        _native.unpack_blocks(self._format, target, source, count)
