"""How long one core takes to round values to 8 or 4 bits, beside a memcpy of them."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from rich import box
from rich.table import Table

from sdp_plugins.core import _native

COUNT = 8 * 1024 * 1024
ROUNDS = 25
MEMCPY = "memcpy"


def measure() -> dict[str, float]:
    """Return the median seconds of alternating turns, by name; of float32 values."""
    values = np.random.default_rng(0).standard_normal(COUNT, np.float32)
    forms = {name: _native.BlockFormat[name] for name in ("int8", "fp8", "int4")}
    most = max(_native.blocks_nbytes(form, COUNT) for form in forms.values())
    copied, packed = np.empty_like(values), np.empty(most, np.uint8)
    target, source = packed.ctypes.data, values.ctypes.data
    times: dict[str, list[float]] = {name: [] for name in (MEMCPY, *forms)}
    for _ in range(ROUNDS):
        for name, found in times.items():
            begin = time.perf_counter()
            if name == MEMCPY:
                np.copyto(copied, values)
            else:
                _native.pack_blocks(forms[name], target, source, COUNT)
            found.append(time.perf_counter() - begin)
    return {name: median(found) for name, found in times.items()}


def rounding_table(seconds: dict[str, float]) -> Table:
    """Return the times, and their ratios to memcpy."""
    table = Table(
        title=f"rounding {COUNT / 2**20:g} Mi values of float32 on one core",
        caption=f"medians of {ROUNDS} alternating turns",
        box=box.SIMPLE_HEAD,
    )
    for name in ("to", "ms", "of memcpy"):
        table.add_column(name, justify="left" if name == "to" else "right")
    for name, found in seconds.items():
        table.add_row(name, f"{found * 1e3:.2f}", f"{found / seconds[MEMCPY]:.2f}")
    return table
