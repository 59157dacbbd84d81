"""Says what takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Print a line to stderr if the context takes longer than `PATIENCE_S`."""

    def announce() -> None:
        print(f"{text} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE_S, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
