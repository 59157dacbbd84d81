"""Objects that a job may leave on the machine: shared memory and files, including socket files.

Abstract sockets and memory files have no name: they disappear with the last process that holds
them.
"""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from dataclasses import dataclass

from tests.leaks import GRACE_S, shared_memory

TORCHS = {f"torchinductor_{getpass.getuser()}"}  # a cache that importing torch creates


@dataclass(frozen=True)
class Leftovers:
    """The present objects of the kinds that a job might leave."""

    shared_memory: frozenset[str]
    files: frozenset[str]

    @classmethod
    def now(cls) -> Leftovers:
        files = os.listdir(tempfile.gettempdir())
        return cls(frozenset(shared_memory()), frozenset(files) - TORCHS)

    def since(self) -> list[str]:
        """Return new objects, after a grace period for processes that are ending."""
        end = time.monotonic() + GRACE_S
        while (found := self._found()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _found(self) -> list[str]:
        now = Leftovers.now()
        memory = [f"/dev/shm/{name}" for name in now.shared_memory - self.shared_memory]
        files = [f"temporary file {name}" for name in now.files - self.files]
        return [f"left: {text}" for text in (*memory, *files)]
