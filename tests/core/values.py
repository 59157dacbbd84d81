"""Inputs of every element type, and what NumPy says their reductions are, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp_plugins.core import Buffer, DType

Array = NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)

REDUCTIONS = {
    **dict.fromkeys(FLOATS, ("sum", "avg", "product", "min", "max", "premul_sum")),
    **dict.fromkeys(INTEGERS, ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")),
    **dict.fromkeys(COMPLEX, ("sum", "avg", "product", "premul_sum")),
    "bool": ("sum", "product", "min", "max", "band", "bor", "bxor"),
}
"""The pairs that have a meaning."""

FACTORS = (0.1, -3.0, 7.5, 1.0)
"""What each rank multiplies by in PREMUL_SUM."""


def storage(dtype: str) -> np.dtype[Any]:
    """NumPy's type for the bits of an element; NumPy itself has no bfloat16."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def as_input(array: Array, dtype: str) -> Array | Buffer:
    """What to hand to a group."""
    if dtype != "bfloat16":
        return array
    return Buffer(array.ctypes.data, array.size, DType.bfloat16, array)


def values(dtype: str, count: int, rank: int, salt: int = 0) -> Array:
    """One rank's input: integers over their whole range, floats over many magnitudes."""
    return _values(dtype, count, rank, salt).copy()  # the caller's own


@lru_cache(32)  # drawing large ones takes longer than most of what is tested with them
def _values(dtype: str, count: int, rank: int, salt: int) -> Array:
    random = np.random.default_rng((salt, rank, count))
    if dtype == "bool":
        return random.random(count) < 0.5
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype, endpoint=True)
    if dtype in COMPLEX:
        parts = _floats(random, 2 * count)
        return parts.view(np.complex128).astype(dtype)
    return narrow(_floats(random, count).astype(accumulator(dtype)), dtype)


def _floats(random: np.random.Generator, count: int) -> Array:
    return random.standard_normal(count) * 2.0 ** random.integers(-8, 8, count)


# ---- 16-bit floats ------------------------------------------------------------------------------


def accumulator(dtype: str) -> np.dtype[Any]:
    """The type in which values are folded."""
    return np.dtype(np.float32) if dtype in ("float16", "bfloat16") else storage(dtype)


def widen(array: Array, dtype: str) -> Array:
    """Elements as accumulators, exactly."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(accumulator(dtype))


def narrow(array: Array, dtype: str) -> Array:
    """Accumulators as elements, rounded once to the nearest, ties to even."""
    if dtype == "bfloat16":
        return _to_bfloat16(array)
    return array.astype(storage(dtype))


def _to_bfloat16(array: Array) -> Array:
    """By comparing distances to both neighbours: another way than the core's."""
    below = (array.view(np.uint32) >> 16).astype(np.uint16)  # toward zero
    above = below + np.uint16(1)
    exact = array.astype(np.float64)

    def distance(bits: Array) -> Array:
        value = widen(bits, "bfloat16").astype(np.float64)
        return np.abs(np.where(np.isinf(value), np.copysign(2.0**128, value), value) - exact)

    down, up = distance(below), distance(above)
    odd = (below & 1).astype(bool)
    rounded = np.where((up < down) | ((up == down) & odd), above, below)
    kept = np.where(np.isnan(array), below | np.uint16(0x40), below)
    return np.where(np.isfinite(array), rounded, kept).astype(np.uint16)


# ---- reductions ---------------------------------------------------------------------------------


def tree(parts: Sequence[Array], fold: Callable[[Array, Array], Array]) -> Array:
    """The documented order: ((0 + 1) + (2 + 3)) + 4."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return fold(tree(parts[:half], fold), tree(parts[half:], fold))


def _multiply(a: Array, b: Array) -> Array:
    """Complex numbers by the school formula, without fused multiply-adds."""
    if a.dtype.kind != "c":
        return np.multiply(a, b)
    real = a.real * b.real - a.imag * b.imag
    return _complex(real, a.real * b.imag + a.imag * b.real, a.dtype)


def _complex(real: Array, imag: Array, dtype: np.dtype[Any]) -> Array:
    out = np.empty(real.shape, dtype)
    out.real, out.imag = real, imag
    return out


def _by_parts(array: Array, function: Callable[[Array], Array]) -> Array:
    if array.dtype.kind != "c":
        return function(array)
    return _complex(function(array.real), function(array.imag), array.dtype)


FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "product": _multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def reduced(inputs: Sequence[Array], dtype: str, op: str) -> Array:
    """The result of a reduction of all ranks' inputs; they are not changed."""
    with np.errstate(all="ignore"):
        if op == "avg" and dtype in INTEGERS:
            total = tree([x.astype(np.int64) for x in inputs], np.add)
            # Toward zero, as in C.
            return ((total - np.fmod(total, len(inputs))) // len(inputs)).astype(dtype)
        parts = [widen(x, dtype) for x in inputs]
        if op == "premul_sum":
            parts = [_scaled(x, factor) for x, factor in zip(parts, FACTORS, strict=False)]
        total = tree(parts, FOLDS[op])
        if op == "avg":
            total = _by_parts(total, lambda x: x / x.dtype.type(len(inputs)))
        return narrow(total, dtype)


def _scaled(array: Array, factor: float) -> Array:
    return _by_parts(array, lambda x: x * x.dtype.type(factor))


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal to the last bit (NaNs and zeros' signs included)."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
