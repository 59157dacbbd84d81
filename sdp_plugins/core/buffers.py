"""Describes the caller's memory: collectives take memory, not a framework's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _native
from .dtypes import DType

_address = _native.address
BufferLike = Any
"""The buffer protocol, ``__array_interface__``, ``__dlpack__``, or a ``Buffer``."""


@dataclass(slots=True)
class Buffer:
    """Contiguous elements in CPU memory.

    Attributes:
        ptr: Address of the first element.
        count: Number of elements.
        dtype: Their type.
        keepalive: Object that owns the memory; held until an operation on it is done.
    """

    ptr: int
    count: int
    dtype: DType
    keepalive: object = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def split(self, counts: Sequence[int]) -> list[Buffer]:
        """Consecutive parts of the given lengths."""
        parts, at, itemsize = [], self.ptr, self.dtype.itemsize
        for count in counts:
            parts.append(Buffer(at, count, self.dtype, self.keepalive))
            at += count * itemsize
        return parts

    def copied(self) -> Buffer:
        """A copy of the elements."""
        there = (ctypes.c_ubyte * self.nbytes).from_address(self.ptr)
        memory = np.frombuffer(memoryview(there), np.uint8).copy()
        return Buffer(memory.ctypes.data, self.count, self.dtype, memory)


_NUMPY: dict[np.dtype[Any], DType] = {
    np.dtype(dtype.value): dtype for dtype in DType if dtype is not DType.bfloat16
}
# DLPack's (type code, bits); 4 is bfloat16, 5 complex, 6 bool.
_DLPACK = {
    (2, 16): DType.float16,
    (2, 32): DType.float32,
    (2, 64): DType.float64,
    (4, 16): DType.bfloat16,
    (0, 8): DType.int8,
    (0, 16): DType.int16,
    (0, 32): DType.int32,
    (0, 64): DType.int64,
    (1, 8): DType.uint8,
    (6, 8): DType.bool,
    (5, 64): DType.complex64,
    (5, 128): DType.complex128,
}

_READ_ONLY = "the array is read-only, but would be written. Hint: pass a copy."


def as_buffer(data: BufferLike, *, writable: bool = True) -> Buffer:
    """Describe a caller's memory without copying it.

    Args:
        data: An object with one of the interfaces of ``BufferLike``.
        writable: Whether it will be written.

    Raises:
        TypeError: The object does not describe memory, is on another device, or has elements of an
            unsupported type.
        ValueError: The memory is not contiguous, or is read-only but will be written.
    """
    if type(data) is Buffer:
        return data
    if isinstance(data, np.ndarray):
        dtype = _NUMPY.get(data.dtype)
        if dtype is not None:
            try:  # the buffer protocol is quick, and refuses what must be refused, but says less
                return Buffer(_address(data, writable), data.size, dtype, data)
            except (BufferError, ValueError):
                pass
        return _from_numpy(data, writable)
    if writable and isinstance(data, np.generic):  # it exports a copy of itself
        raise TypeError(
            f"{type(data).__name__} is a NumPy scalar, which cannot be written. Hint: pass an "
            "array, such as np.array([value])."
        )
    if hasattr(data, "__dlpack__"):
        return _from_dlpack(data, writable)
    try:
        array = np.asarray(memoryview(data) if not hasattr(data, "__array_interface__") else data)
    except TypeError:
        raise TypeError(
            f"{type(data).__name__} describes no memory. Hint: pass a NumPy array, a tensor with "
            "__dlpack__, or anything with the buffer protocol."
        ) from None
    return _from_numpy(array, writable)


def _from_numpy(array: np.ndarray[Any, Any], writable: bool) -> Buffer:
    dtype = _NUMPY.get(array.dtype) or _named(array.dtype)
    if not array.flags.c_contiguous:
        raise ValueError(_not_contiguous(array.shape, array.strides))
    if writable and not array.flags.writeable:
        raise ValueError(_READ_ONLY)
    return Buffer(array.__array_interface__["data"][0], array.size, dtype, array)


def _named(dtype: np.dtype[Any]) -> DType:
    """Types that NumPy lacks: ml_dtypes' bfloat16."""
    if dtype.name == "bfloat16":
        return DType.bfloat16
    raise _unsupported(f"type {dtype}")


def _unsupported(elements: str) -> TypeError:
    names = ", ".join(known.value for known in DType)
    return TypeError(f"elements of {elements} are not supported. Hint: convert to one of {names}.")


def _from_dlpack(data: Any, writable: bool) -> Buffer:
    for lazy in ("conj", "neg"):  # torch applies these when it reads the elements
        if (is_lazy := getattr(data, f"is_{lazy}", None)) is not None and is_lazy():
            raise ValueError(
                f"the tensor is a lazy {lazy} view of other elements. "
                f"Hint: pass tensor.resolve_{lazy}()."
            )
    device_type = int(data.__dlpack_device__()[0])
    if device_type != 1:
        raise TypeError(
            f"the data lies on another device (DLPack device type {device_type}). "
            "Hint: copy it to the CPU first."
        )
    try:
        address, shape, strides, code, bits, may_write = _native.inspect(data)
    except TypeError:
        raise TypeError(f"cannot read the memory of {type(data).__name__} by DLPack") from None
    dtype = _DLPACK.get((code, bits))
    if dtype is None:
        raise _unsupported(f"DLPack type ({code}, {bits} bits)")
    if writable and not may_write:
        raise ValueError(_READ_ONLY)
    return Buffer(address, _contiguous_count(shape, strides), dtype, data)


def _contiguous_count(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    count = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != count:
            raise ValueError(_not_contiguous(tuple(shape), tuple(strides)))
        count *= extent
    return count


def _not_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    return (
        f"the buffer is not contiguous (shape {shape}, strides {strides}). "
        "Hint: pass a contiguous copy and copy the result back."
    )
