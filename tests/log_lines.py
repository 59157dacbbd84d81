"""What a rank logs: pytest's caplog is in the test process only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged(name: str, level: int | None = None) -> Iterator[list[str]]:
    """The messages of a logger and those below it, from a level on; None: from its own."""
    logger, handler = logging.getLogger(name), _Lines()
    if level is not None:
        logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
