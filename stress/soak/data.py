"""Ranks' data, which every rank can derive for every other rank, as NumPy bits and as tensors."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.core.values import DTYPES, Array, storage, values

MOST_BYTES = 4 * 2**20
SPREAD = 4096  # range of the first element of a rank's data
MOVED_ONLY = ("uint16", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn")
ALL_DTYPES = (*DTYPES, *MOVED_ONLY)


def bits(dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype for the bits of an element of any torch dtype."""
    return np.dtype(np.uint8) if dtype.startswith("float8") else storage(dtype)


@cache
def pool(dtype: str) -> Array:
    """Return values to cut inputs from; drawn once, as drawing takes longer than reducing."""
    count = MOST_BYTES // bits(dtype).itemsize + SPREAD
    if dtype in MOVED_ONLY:
        return values("uint8", count * bits(dtype).itemsize, 0).view(bits(dtype))
    drawn = values(dtype, count, 0)
    if bits(dtype).kind != "b":
        drawn[drawn == 0] = 1  # the minimum of two zeros is undefined
    return drawn


def cut(dtype: str, count: int, *key: object) -> Array:
    """Return read-only values for a key (seed, operation, rank, ...)."""
    begin = random.Random(repr(key)).randrange(SPREAD)
    assert count <= pool(dtype).size - SPREAD
    return pool(dtype)[begin : begin + count]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype."""
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def raw(tensor: Tensor) -> bytes:
    """Return a tensor's elements in their logical order."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    return as_bytes(dense.copy_(tensor.detach())).numpy().tobytes()


def as_bytes(dense: Tensor) -> Tensor:
    return dense.reshape(-1).view(torch.uint8)


LAYOUTS = ("dense", "dense", "dense", "offset", "strided", "transposed")


def laid_out(array: Array, dtype: str, layout: str = "dense") -> Tensor:
    """Return a tensor in torch's own memory with these elements, in their logical order."""
    kind, count = torch_dtype(dtype), array.size
    if layout == "offset":
        tensor = torch.zeros(count + 3, dtype=kind)[3:]
    elif layout == "strided":
        tensor = torch.zeros(2 * count, dtype=kind)[::2]
    elif layout == "transposed" and count % 3 == 0:
        tensor = torch.zeros(3, count // 3, dtype=kind).t()
    else:
        tensor = torch.zeros(count, dtype=kind)
    fill(tensor, array)
    return tensor


def fill(tensor: Tensor, array: Array) -> None:
    """Overwrite a tensor of any layout."""
    source = torch.zeros(array.size, dtype=tensor.dtype)
    as_bytes(source).numpy()[:] = np.ascontiguousarray(array).view(np.uint8)
    tensor.copy_(source.view(tensor.shape))
