"""How values are rounded to fewer bytes, and back."""

from __future__ import annotations

import ctypes
import struct
import zlib

from . import _native
from .wire_dtype import WireDType

_FLOAT32 = 4
PIECE = 128 * 1024
"""Values that stay in a core's cache from one operation to the next; whole blocks."""


def encoding_of(wire_dtype: WireDType) -> Encoding:
    """The encoding of float32 values as this type."""
    if wire_dtype.has_blocks:
        return Blocks(wire_dtype)
    return Half(_native.DType[wire_dtype.name])


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
        return self.nbytes(begin)

    def pack(
        self, target: int, source: int, count: int, residual: int = 0, key: tuple[int, ...] = ()
    ) -> None:
        """Convert for the wire.

        Args:
            target: Address of the bytes.
            source: Address of the values.
            count: Number of values.
            residual: Address of what earlier roundings have left out of these values; 0: of none.
            key: Nonnegative numbers that make the random numbers those of this call only.
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

    def pack(
        self, target: int, source: int, count: int, residual: int = 0, key: tuple[int, ...] = ()
    ) -> None:
        """Copy."""
        ctypes.memmove(target, source, self.nbytes(count))

    def unpack(self, target: int, source: int, count: int) -> None:
        """Copy."""
        ctypes.memmove(target, source, self.nbytes(count))


class Half(Encoding):
    """Values of float32, rounded to a 16-bit type."""

    def __init__(self, dtype: _native.DType) -> None:
        self._dtype = dtype

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        return 2 * count

    def pack(
        self, target: int, source: int, count: int, residual: int = 0, key: tuple[int, ...] = ()
    ) -> None:
        """Round."""
        _native.narrow(self._dtype, target, source, count)

    def unpack(self, target: int, source: int, count: int) -> None:
        """Widen."""
        _native.widen(self._dtype, target, source, count)


class Blocks(Encoding):
    """Values of float32, rounded to 8 or 4 bits, with a scale for each block of 256."""

    def __init__(self, wire_dtype: WireDType) -> None:
        self._format = _native.BlockFormat[wire_dtype.name]
        self._seed = wire_dtype.seed

    def nbytes(self, count: int) -> int:
        """Bytes of so many."""
        return _native.blocks_nbytes(self._format, count)

    def offset(self, begin: int, part: int) -> int:
        """Bytes in front of a part.

        A block that is cut by its begin has two scales, and a byte of 4-bit numbers two halves.
        """
        return self.nbytes(begin) + part * (_FLOAT32 + 1)

    def pack(
        self, target: int, source: int, count: int, residual: int = 0, key: tuple[int, ...] = ()
    ) -> None:
        """Round; with a seed stochastically, and in the same way in every run."""
        seed = self._seed
        if seed is not None:
            seed = zlib.crc32(struct.pack(f"<{len(key) + 1}Q", seed, *key))
        _native.pack_blocks(self._format, target, source, count, residual, seed)

    def unpack(self, target: int, source: int, count: int) -> None:
        """Widen."""
        _native.unpack_blocks(self._format, target, source, count)
