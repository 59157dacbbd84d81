"""The values that the ranks put into their buffers, and the expected sums.

Element i of rank r starts as `(1 + i % 4 + r % 2) * start`; the sum over n ranks has a closed form
that every dtype represents exactly. The timed loop reduces the same buffer repeatedly, so values
grow by a factor n each time. `start` is as small and `run_length` as long as keeps every value a
normal number: infinities and denormals take other paths in software float16, which would make the
timing unrepresentative of training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERIOD = 4
INT_RUN_LENGTH = 200  # integer overflow costs nothing; refill now and then all the same

# dtype -> (NumPy storage, exponent of `start`, largest exponent, relative rounding error)
_FLOATS = {
    "float16": (np.float16, -14, 15, 2.0**-10),
    "bfloat16": (np.uint16, -100, 127, 2.0**-7),  # NumPy has no bfloat16, so this stores its bits
    "float32": (np.float32, -100, 127, 2.0**-23),
    "float64": (np.float64, -100, 127, 2.0**-52),
}
_INTS = {"int8": np.int8, "uint8": np.uint8, "int32": np.int32, "int64": np.int64}
DTYPES = (*_FLOATS, *_INTS)


def storage(dtype: str) -> np.dtype:
    """Return the NumPy dtype that holds elements of `dtype` (bfloat16 as uint16)."""
    return np.dtype(_FLOATS[dtype][0] if dtype in _FLOATS else _INTS[dtype])


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return storage(dtype).itemsize


def run_length(dtype: str, ranks: int) -> int:
    """Return how many in-place all_reduce calls keep all values normal; at least 2."""
    if dtype in _INTS or ranks == 1:
        return INT_RUN_LENGTH
    _, low, high, _ = _FLOATS[dtype]
    room = high - low - math.log2((PERIOD + 1) * ranks)
    return max(2, min(INT_RUN_LENGTH, int(room / math.log2(ranks))))


def fill(buffer: NDArray, dtype: str, rank: int) -> None:
    """Write a rank's start values."""
    for i in range(PERIOD):
        buffer[i::PERIOD] = _encode(_scaled(dtype, 1 + i + rank % 2), dtype)


def check(
    buffer: NDArray, dtype: str, ranks: int, times: int, stride: int = 1, rounding: float = 0.0
) -> None:
    """Compare a buffer with the closed form after `times` all_reduce sums.

    Args:
        buffer: The result.
        dtype: Its element type.
        ranks: Number of ranks.
        times: Number of sums, at least 1.
        stride: Check one period in `stride` only; 1 checks everything.
        rounding: Relative error that is allowed beside the type's own.

    Raises:
        ArithmeticError: An element is wrong; the text names the first one.
    """
    # Powers of two stay exact; any other number of ranks causes one rounding for each sum.
    exact = ranks & (ranks - 1) == 0
    tolerance = 0.0 if exact or dtype in _INTS else (times + 1) * _FLOATS[dtype][3]
    tolerance += rounding
    for i in range(PERIOD):
        want = _expected(dtype, ranks, times, i)
        got = decode(buffer[i :: PERIOD * stride], dtype)
        right = np.abs(got - want) <= tolerance * want if tolerance else got == want
        wrong = np.flatnonzero(~right)
        if wrong.size:
            where = i + int(wrong[0]) * PERIOD * stride
            raise ArithmeticError(
                f"wrong sum: element {where} is {got[wrong[0]]!r}, expected {want!r} "
                f"after {times} x all_reduce {dtype}[{buffer.size}] on {ranks} ranks"
            )


def decode(buffer: NDArray, dtype: str) -> NDArray:
    """Return the numbers in a buffer, in a dtype wide enough to compare."""
    if dtype == "bfloat16":
        return (buffer.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return buffer if dtype in _INTS else buffer.astype(np.float64)


def _encode(value: float, dtype: str) -> Any:
    if dtype == "bfloat16":
        return np.float32(value).view(np.uint32) >> np.uint32(16)
    return storage(dtype).type(value)


def _scaled(dtype: str, value: int) -> float:
    return value if dtype in _INTS else math.ldexp(value, _FLOATS[dtype][1])


def _expected(dtype: str, ranks: int, times: int, residue: int) -> Any:
    once = ranks * (1 + residue) + ranks // 2  # odd ranks add one
    total = once * ranks ** (times - 1)
    if dtype in _FLOATS:
        return float(_scaled(dtype, total))
    bits = 8 * itemsize(dtype)
    return np.array(total % 2**bits, dtype=f"uint{bits}").astype(storage(dtype))[()]
