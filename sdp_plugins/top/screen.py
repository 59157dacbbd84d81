"""The job in a terminal, until it ends or the user leaves."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sdp_plugins.top.plain_text import table
from sdp_plugins.top.sampling import Sampling
from sdp_plugins.top.view import JobView

_LEAVE = b"qQ\x04"


class Screen:
    """The terminal of this process, which shows a job.

    Args:
        sampling: Reads the job.
        notes: Lines to show below it.
    """

    def __init__(self, sampling: Sampling, notes: Sequence[str]) -> None:
        self._sampling = sampling
        self._notes = notes
        self._live = Live(console=Console(), screen=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        self._mode = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)  # keys arrive at once; Ctrl-C still interrupts
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._mode)

    def run(self, interval_s: float) -> str:
        """Show the job; returns why it has ended, or nothing if the user leaves."""
        self._live.update(Text("reading ..."), refresh=True)
        self._sampling.read()
        while not _asked_to_leave(time.monotonic() + interval_s):
            self._sampling.read()
            if self._sampling.ended:
                return self._sampling.ended
            self._live.update(Group(*self._lines(self._sampling.view())), refresh=True)
        return ""

    def _lines(self, view: JobView) -> Iterator[Text]:
        yield _line(view.title, "bold")
        for group in view.groups:
            straggles = any(row.straggler for row in group.rows)
            headings, *ranks = table(group)
            yield _line("")
            yield _line(group.title, "yellow" if straggles else "")
            yield _line(headings, "dim")
            for row, text in zip(group.rows, ranks, strict=True):
                yield _line(text, "red" if row.gone else "yellow" if row.straggler else "")
        yield _line("")
        for text in filter(None, [view.idle, *self._notes, "q leaves"]):
            yield _line(text, "dim")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _asked_to_leave(until: float) -> bool:
    """Wait; returns earlier if the user presses a key to leave, or closes the terminal."""
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if not key or key in _LEAVE:
                return True
    return False
