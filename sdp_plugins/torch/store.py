"""torch's key-value store as the core's."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

# We ask again and again: torch's own wait does not notice Ctrl-C and logs its time-outs.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.05


class TorchStore:
    """A core Store over a torch Store.

    Args:
        store: torch's store, or a view of it that only one group uses.
        given_up: Whether to stop waiting for values.
    """

    def __init__(self, store: Store, given_up: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._given_up = given_up

    @classmethod
    def of_new_group(cls, store: Store, rank: int) -> TorchStore:
        """Keys for a group that is about to be made.

        torch gives a group that is made after destroy_process_group() the same keys again if the
        store outlives it (an elastic agent's does), so groups are counted.
        """
        generation = store.add(f"groups/{rank}", 1)
        return cls(PrefixStore(f"group{generation}", store))

    def under(self, prefix: str, given_up: Callable[[], bool] = lambda: False) -> TorchStore:
        """A part of the store with its own keys."""
        return TorchStore(PrefixStore(prefix, self._store), given_up)

    @property
    def raw(self) -> Store:
        """Torch's store."""
        return self._store

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value.

        Raises:
            TimeoutError: It was not there in time.
        """
        end, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not self._store.check([key]):
            left_s = end - time.monotonic()
            if left_s <= 0 or self._given_up():
                raise TimeoutError(f"{key} was not set in {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return bytes(self._store.get(key))
