"""What the caller of an operation asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import _native

Piece = tuple[int, int]
"""Address and number of elements."""


@dataclass(frozen=True)
class Request:
    """An operation as its caller describes it; the counterpart of the native one."""

    op: _native.Op
    dtype: _native.DType
    reduce_op: _native.ReduceOp
    factor: float
    root: int
    sends: tuple[Piece, ...]
    recvs: tuple[Piece, ...]
    timeout_s: float
    layout: int = 0
    peer: int = -1
    tag: int = 0
    signature: _native.OpSignature = field(kw_only=True)

    @property
    def count(self) -> int:
        """Elements that all ranks must agree on."""
        if self.op is _native.Op.all_reduce:
            return sum(count for _, count in self.recvs)
        return max((count for _, count in (*self.sends, *self.recvs)), default=0)

    def touches(self, other: Request) -> bool:
        """Whether the two use some of the same memory."""
        mine, theirs = self._spans(), other._spans()
        spans = sorted([(*span, 0) for span in mine] + [(*span, 1) for span in theirs])
        ends = [0, 0]
        for begin, end, owner in spans:
            if ends[1 - owner] > begin:
                return True
            ends[owner] = max(ends[owner], end)
        return False

    def _spans(self) -> list[tuple[int, int]]:
        size = _native.itemsize(self.dtype)
        pieces = (*self.sends, *self.recvs)
        return [(address, address + count * size) for address, count in pieces if count]
