"""What a framework's key-value store has to offer to bring up a group."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """A key-value store that all ranks of a job share.

    A thin adapter makes one of a framework's store. Keys are never deleted or overwritten by this
    package, so whoever creates a group must give it keys that no earlier group has used.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store a value; it becomes visible to all ranks."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key, waiting until it is there.

        Raises:
            TimeoutError: It was not there within ``timeout_s`` seconds. Zero asks without waiting.
        """
