"""The file in which ranks say when they begin and commit steps."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

from benchmarks.rank import end_with

BEGAN, COMMITTED = "began", "committed"


class Said(NamedTuple):
    """What a rank has said.

    Attributes:
        at: When, on the monotonic clock, which all processes share.
        pid: The rank's process.
        what: BEGAN or COMMITTED.
        generation: How often all ranks have been started again.
        step: The step's number.
        world: Number of ranks that take part in it; 0 if it has only begun.
    """

    at: float
    pid: int
    what: str
    generation: int
    step: int
    world: int


class Teller:
    """Writes what a rank does; it ends when the benchmark does.

    Args:
        setting: `said`, the file's path, and `runner_pid`.
        generation: How often all ranks have been started again.
    """

    def __init__(self, setting: dict[str, Any], generation: int = 0) -> None:
        end_with(setting["runner_pid"])
        self._fd = os.open(setting["said"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._generation = generation

    def began(self, step: int) -> None:
        """Say that a step begins."""
        self._say(BEGAN, step, 0)

    def committed(self, step: int, world: int) -> None:
        """Say that a step has been committed, in which so many ranks took part."""
        self._say(COMMITTED, step, world)

    def _say(self, what: str, step: int, world: int) -> None:
        said = Said(time.monotonic(), os.getpid(), what, self._generation, step, world)
        os.write(self._fd, json.dumps(said).encode() + b"\n")


def read(data: bytes) -> list[Said]:
    """Return what whole lines of the file say."""
    return [Said(*json.loads(line)) for line in data.splitlines()]
