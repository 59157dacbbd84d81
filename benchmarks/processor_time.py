"""The kernel's figures for the processor time of this process's threads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENGINE = "sdp-engine"


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds since the start of this process's threads.

    Attributes:
        script: Of all threads but smddp's engines.
        engine: Of smddp's engines.
    """

    script: float
    engine: float


def processor_time(tasks: Path = Path("/proc/self/task")) -> ProcessorTime:
    """Return the processor time of the threads that live; threads that have ended do not count."""
    script = engine = 0
    for task in tasks.iterdir():
        with suppress(OSError):  # it ends meanwhile
            ns = int((task / "schedstat").read_text().split()[0])
            if (task / "comm").read_text().strip() == ENGINE:
                engine += ns
            else:
                script += ns
    return ProcessorTime(script / 1e9, engine / 1e9)
