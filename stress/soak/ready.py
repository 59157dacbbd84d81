"""What ranks of a soak are forked with: modules, and the values that their inputs are cut from."""

from stress.soak import rank
from stress.soak.data import ALL_DTYPES, pool

for dtype in ALL_DTYPES:
    pool(dtype)

__all__ = ["rank"]
