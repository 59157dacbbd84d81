"""Intentional errors that a soak has to find: leaks, and wrong values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from stress.soak.data import pool

held: list[Any] = []


def descriptor() -> None:
    """Leak a descriptor in every hundredth step."""
    held.append(os.memfd_create("leak") if len(held) % 100 == 0 else None)


def memory() -> None:
    """Leak a kilobyte in every step."""
    held.append(bytes(1000))


def thread() -> None:
    """Leak a thread in every hundredth step."""
    held.append(None)
    if len(held) % 100 == 0:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def values() -> None:
    """Give rank 1 other values than the other ranks expect of it."""
    if os.environ["RANK"] == "1" and not held:
        held.append(None)
        for dtype in ("float32", "int32", "uint8"):
            pool(dtype)[:] = pool(dtype)[::-1].copy()


WAYS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "descriptor": descriptor,
    "memory": memory,
    "thread": thread,
    "values": values,
}
