"""torch's key-value store behind the core's Store interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from sdp_plugins.core.errors import RendezvousTimeoutError

# Polling: torch's own wait ignores Ctrl-C and logs its timeouts.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.05
LEAST_ANSWER_S = 0.5
LOOK_S = 0.005  # between two calls of a check
T = TypeVar("T")


class TorchStore:
    """A core Store over a torch Store.

    Args:
        store: torch's store, or a view of it for one group.
        check: Called during each wait for a value; an exception from it ends the wait.
        answer_s: How long the process that serves the store may take to answer.
    """

    def __init__(
        self, store: Store, check: Callable[[], None] = lambda: None, answer_s: float = 30.0
    ) -> None:
        self._store = store
        self._check = check
        self._answer_s = answer_s

    @classmethod
    def of_new_group(cls, store: Store, rank: int, answer_s: float = 30.0) -> TorchStore:
        """Return a key space for a group that is about to be created.

        torch gives a group that is created after destroy_process_group() the same keys again if the
        store outlives the group, as an elastic agent's does. Each group therefore gets a number.

        Raises:
            RendezvousTimeoutError: The store did not answer.
        """
        generation = answer(lambda: store.add(f"groups/{rank}", 1), answer_s)
        return cls(PrefixStore(f"group{generation}", store), answer_s=answer_s)

    def under(self, prefix: str, check: Callable[[], None] = lambda: None) -> TorchStore:
        """Return a part of the store with its own keys."""
        return TorchStore(PrefixStore(prefix, self._store), check, self._answer_s)

    @property
    def raw(self) -> Store:
        """Torch's store."""
        return self._store

    def set(self, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            RendezvousTimeoutError: The store did not answer.
        """
        answer(lambda: self._store.set(key, value), self._answer_s)  # type: ignore[arg-type]

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value.

        Raises:
            TimeoutError: The value was not there in time.
            Exception: Any exception from `check`.
            RendezvousTimeoutError: The store did not answer.
        """
        left = Event()
        try:
            ask = partial(self._ask, key, timeout_s, left)
            return bytes(answer(ask, timeout_s + LEAST_ANSWER_S))
        finally:
            left.set()

    def _ask(self, key: str, timeout_s: float, left: Event) -> bytes:
        """Poll until there is a value or `left` is set."""
        end, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not self._store.check([key]):
            left_s = end - time.monotonic()
            self._check()
            if left_s <= 0 or left.is_set():
                raise TimeoutError(f"{key} was not set in {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return self._store.get(key)


def answer(call: Callable[[], T], limit_s: float, check: Callable[[], None] | None = None) -> T:
    """Return the result of a call to torch's store.

    The call blocks without limit if the process that serves the store is stopped. It therefore runs
    in its own thread, which is left behind on timeout, or when `check`, which is called meanwhile,
    raises an exception.

    Raises:
        RendezvousTimeoutError: There was no answer in time.
    """
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    began = time.monotonic()
    thread = Thread(target=ask, name="sdp-store", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < began + limit_s:
        thread.join(LOOK_S if check else limit_s)
        if check:
            check()
    if not found:
        raise RendezvousTimeoutError(
            f"rendezvous: torch's store did not answer in {limit_s:.3g} s. Hint: the process that "
            "serves it (rank 0's, where torchrun does not) is stopped, or cannot be reached.",
            op="rendezvous",
            elapsed_s=time.monotonic() - began,
        )
    value, error = found[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
