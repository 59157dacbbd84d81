"""Averages named numbers over the ranks, such as the logs of an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np

from .group import Group


def average_numbers(group: Group, logs: dict[str, Any] | None) -> None:
    """Average all numbers in place; other values stay. Names must be equal on all ranks."""
    names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
    if logs and names:
        values = np.array([float(logs[name]) for name in names])
        group.all_reduce(values, "avg")
        logs.update(zip(names, values.tolist(), strict=True))
