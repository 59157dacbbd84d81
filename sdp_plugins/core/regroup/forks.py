"""Closes in forked children what others must see closed when its process ends."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Closable(Protocol):
    def close(self) -> None: ...


_ours: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(resource: _Closable) -> None:
    """Close a forked child's copy, which would hide from others that this process has ended."""
    _ours.add(resource)


def _close_copies() -> None:
    for resource in list(_ours):
        resource.close()


os.register_at_fork(after_in_child=_close_copies)
