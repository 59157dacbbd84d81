"""The failure message of the first rank that gives up, for jobs without MPI."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from torch.distributed import Store

from sdp_plugins.core.errors import RendezvousTimeoutError
from sdp_plugins.torch.store import answer

LOOK_EVERY_S = 0.2
ANSWER_S = 0.02
POST_LIMIT_S = 0.5
FAILURE = "failure"


class FailureStore:
    """A key of the store that holds why a rank gave up.

    The store may be on an unreachable node and then never answers. Separate threads therefore
    access it, and no caller waits for them for long.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: bytes | None = None
        self._looked_s = 0.0
        self._looking: threading.Thread | None = None

    def post(self, message: bytes) -> None:
        """Post the reason, unless a rank has already posted one."""
        # The process that serves the store may have ended or not answer.
        with suppress(RuntimeError, RendezvousTimeoutError):
            answer(lambda: self._store.compare_set(FAILURE, "", message.decode()), POST_LIMIT_S)

    def look(self) -> bytes | None:
        """Return the known failure message, or None; ask the store at intervals."""
        now = time.monotonic()
        asking = self._looking is not None and self._looking.is_alive()
        if self._seen is None and not asking and now - self._looked_s > LOOK_EVERY_S:
            self._looked_s = now
            self._looking = threading.Thread(target=self._ask, name="sdp-failure", daemon=True)
            self._looking.start()
            self._looking.join(ANSWER_S)
        return self._seen

    def _ask(self) -> None:
        with suppress(RuntimeError):
            if self._store.check([FAILURE]):
                self._seen = bytes(self._store.get(FAILURE))
