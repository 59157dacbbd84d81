"""What rounding for the wire has left out of the buffers that return step after step."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .. import _native

_MOST_KEYS = 65536
Key = tuple[int, ...]


class Residuals:
    """One residual for each key, from the second time on that the key is used.

    Buffers that never return, of which a program may make any number, so cost no memory. The
    residual of a buffer that has not returned in the last 65,536 uses is dropped.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, np.ndarray | None] = OrderedDict()

    def address(self, key: Key, count: int) -> int:
        """Address of `count` values of float32, zeros at first; 0: the key is new."""
        is_new = key not in self._kept
        values = self._kept.pop(key, None)
        if values is None and not is_new:
            values = np.zeros(count, np.float32)
        self._kept[key] = values
        while len(self._kept) > _MOST_KEYS:
            self._kept.popitem(last=False)
        return 0 if values is None else _native.address(values)
