"""The job in a terminal, until it ends or the user leaves."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from itertools import chain
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sdp_plugins.top.plain_text import table
from sdp_plugins.top.sampling import Sampling
from sdp_plugins.top.view import GroupView, JobView

_LEAVE = b"qQ\x04"


class Screen:
    """The terminal of this process, which shows a job.

    Args:
        sampling: Reads the job.
        notes: Lines to show above its groups.
    """

    def __init__(self, sampling: Sampling, notes: Sequence[str]) -> None:
        self._sampling = sampling
        self._notes = notes
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

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
            lines = lines_on(self._console, self._sampling.view(), self._notes)
            self._live.update(Group(*lines), refresh=True)
        return ""


def lines_on(console: Console, view: JobView, notes: Sequence[str]) -> list[Text]:
    """The lines that show a job on a screen: whole notes, and as much of the groups as fits."""
    lines = [_line(view.title, "bold")]
    for note in (*notes, "q leaves"):
        lines += Text(note, "dim").wrap(console, console.width, overflow="fold")
    groups = [[*_group_lines(group)] for group in view.groups]
    room = console.height - len(lines) - 2  # for the last lines
    shown = len(groups)
    while shown > 1 and sum(map(len, groups[:shown])) > room:
        shown -= 1
    more = f"{len(groups) - shown} more groups" if shown < len(groups) else ""
    last = [_line(more, "dim"), _line(view.idle, "dim")]
    return [*lines, *chain(*groups[:shown]), *last]


def _group_lines(group: GroupView) -> Iterator[Text]:
    straggles = any(row.straggler for row in group.rows)
    headings, *ranks = table(group)
    yield _line("")
    yield _line(group.title, "yellow" if straggles else "")
    yield _line(headings, "dim")
    for row, text in zip(group.rows, ranks, strict=True):
        yield _line(text, "red" if row.gone else "yellow" if row.straggler else "")


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
