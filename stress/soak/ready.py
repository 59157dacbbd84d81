"""Preloads modules and the pool of input values before a soak forks its ranks."""

from stress.soak import rank
from stress.soak.data import ALL_DTYPES, pool

for dtype in ALL_DTYPES:
    pool(dtype)

__all__ = ["rank"]
