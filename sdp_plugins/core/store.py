"""The interface of a framework's key-value store that is needed to make a group."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """A key-value store that all ranks of a job share.

    A thin adapter wraps a framework's store. This package never deletes or overwrites keys, so each
    group needs keys that no earlier group has used.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store a value; it becomes visible to all ranks."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key, waiting until it is set.

        Raises:
            TimeoutError: It was not set within ``timeout_s`` seconds; zero does not wait.
        """
