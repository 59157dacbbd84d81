"""The all-gather of small blobs that making a group needs from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import SdpError
from ..rank_names import RankNames
from .context import RendezvousContext
from .deadline import Deadline
from .failure import ONE_JOB_HINT, RendezvousFailure

Exchange = Callable[[bytes, float], list[bytes]]
"""All-gathers one small blob per rank: ``exchange(blob, timeout_s)`` returns them in rank order."""


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


class StoreExchange:
    """All-gathers one blob per rank through a store that a framework brings; an ``Exchange``.

    A store cannot tell that a rank has died: one that never publishes is named at the deadline.
    """

    def __init__(self, store: Store, prefix: str, rank: int, names: RankNames) -> None:
        """Prepare; nothing is written yet.

        The prefix starts every key. The caller makes it the same on all ranks and new for each
        group, or a re-created group would read its predecessor's values.
        """
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.names = names
        self._round = 0

    def __call__(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Exchange blobs; see ``Exchange``.

        Raises:
            RendezvousTimeoutError: Ranks did not publish in time; names them.
            RendezvousError: The store failed.
        """
        context = RendezvousContext(self.rank, self.names, Deadline(timeout_s))
        keys = [f"{self.prefix}/{self._round}/{rank}" for rank in range(self.names.world_size)]
        self._round += 1
        with store_failures(context):
            return self._gather(keys, blob, context)

    def _gather(self, keys: list[str], blob: bytes, context: RendezvousContext) -> list[bytes]:
        deadline = context.deadline
        self.store.set(keys[self.rank], blob)
        blobs: list[bytes] = []
        missing: list[int] = []
        for rank, key in enumerate(keys):
            found = blob if rank == self.rank else self._fetch(key, deadline.remaining_s)
            if found is None:
                missing.append(rank)  # continue without waiting: others may be missing too
            else:
                blobs.append(found)
        if missing:
            raise RendezvousFailure.missing(
                f"{self.names.list(missing)} did not arrive in {deadline.allowed}",
                "all ranks of a group must make it, and make their groups in the same order; "
                f"check that they were started; {ONE_JOB_HINT}",
                missing,
            )
        return blobs

    def _fetch(self, key: str, timeout_s: float) -> bytes | None:
        try:
            return bytes(self.store.get(key, timeout_s))
        except TimeoutError:
            return None


@contextmanager
def store_failures(context: RendezvousContext) -> Iterator[None]:
    """Turn exceptions of a framework's store, and failures, into errors of this rank."""
    with context.raising_errors():
        try:
            yield
        except (SdpError, RendezvousFailure):
            raise  # it says all
        except Exception as error:
            what = f"the store failed ({type(error).__name__}: {error})"
            hint = "the process that serves it has probably ended; see that process's output"
            raise RendezvousFailure.refused(what, hint) from error
