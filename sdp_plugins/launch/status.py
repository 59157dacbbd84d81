"""Shows the state of each rank on a terminal, below the output."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sdp_plugins.launch.output import Sink
from sdp_plugins.launch.report import how_it_ended
from sdp_plugins.launch.who_waits import Waiting, long_waits
from sdp_plugins.launch.worker_group import Rank

MOST_LINES = 16
SECOND_S = 1.0
PAUSE_S = 0.1  # between two drawings, however much the ranks write
LOOK_S = 5.0  # between two reads of what the ranks wait for
ROOM = 4  # rows of the terminal that stay free for the output


class Region:
    """Lines of a terminal below the cursor, which stays where the output continues.

    They are not drawn while a line is unfinished, because it may be a prompt; a progress bar does
    not count as unfinished. All output erases them first.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.height = 0
        self._below = False  # whether they start below the cursor's line, not on it

    def erased(self) -> bytes:
        """The bytes that erase the lines."""
        if not self.height:
            return b""
        self.height = 0
        return b"\x1b7\x1b[1E\x1b[J\x1b8" if self._below else b"\r\x1b[J"

    def may_be_drawn(self) -> bool:
        """Whether drawing would not interrupt a line."""
        owner = self.sink.owner
        bar = owner is not None and owner.rewrites
        ready = not self.sink.backlog and self.sink.error is None
        return ready and (bar or not self.sink.midline)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the lines."""
        out = self.erased()
        self._below = self.sink.owner is not None
        self.height = len(lines)
        rows = len(lines) - (not self._below)
        # Make room, scrolling if necessary: moving down keeps the column; then move back up.
        out += b"\x1bD" * rows + (b"\x1b[%dA" % rows if rows else b"") + b"\x1b7"
        first = b"\x1b[1E" if self._below else b""
        out += first + b"\x1b[1E".join(line.encode() for line in lines) + b"\x1b8"
        self.sink.write_over(out)


class Status:
    """Updates the region.

    Args:
        sink: The launcher's stderr, a terminal.
        look: Returns the ranks that have waited for long.
    """

    def __init__(self, sink: Sink, look: Callable[[], Mapping[int, Waiting]] = long_waits) -> None:
        self.region = Region(sink)
        sink.erase_below = self.region.erased
        self.states: dict[int, tuple[str, float]] = {}  # of each rank, and its start
        self.ended: dict[int, float] = {}  # how long they ran
        self.waits: Mapping[int, Waiting] = {}
        self._look = look
        self._looked: float | None = None
        self._next = 0.0

    def due(self) -> float:
        """When to draw again, on the monotonic clock."""
        soon = time.monotonic() + PAUSE_S
        return max(self._next, soon) if self.region.height else soon

    def refresh(self, ranks: Sequence[Rank], running: Mapping[int, Rank], now: float) -> None:
        """Read the states of the ranks, and draw them when it is time."""
        for number, rank in enumerate(ranks):
            self._note(number, self._state(rank, number in running), now)
        self._look_at_waits(now)
        stale = not self.region.height and now >= self._next - SECOND_S + PAUSE_S
        if (now >= self._next or stale) and self.states and self.region.may_be_drawn():
            self._next = now + SECOND_S
            if lines := self.lines(now):
                self.region.draw(lines)

    def _look_at_waits(self, now: float) -> None:
        """Read what the ranks wait for, every few seconds; a failure only leaves it out."""
        if self._looked is None:
            self._looked = now
        if now >= self._looked + LOOK_S:
            self._looked, self.waits = now, {}
            with suppress(Exception):
                self.waits = self._look()

    def _state(self, rank: Rank, running: bool) -> str:
        if running:
            return "running" if rank.started else "starting"
        code = rank.exit_code()
        return f"failed: {how_it_ended(code)}" if code else "ended"

    def _note(self, number: int, state: str, now: float) -> None:
        before, since = self.states.get(number, ("", now))
        if state == before:
            return
        if before == "running":
            self.ended[number] = now - since
        self.states[number] = (state, now)
        self._next = min(self._next, now + PAUSE_S)

    def lines(self, now: float) -> list[str]:
        """The lines to draw: one per rank, or one for all."""
        try:
            columns, rows = os.get_terminal_size(self.region.sink.fd)
        except OSError:  # it was closed
            return []
        columns, rows = columns or 80, rows or 24  # unknown
        if len(self.states) > min(MOST_LINES, rows - ROOM):
            found = [self.summary(now)]
        else:
            found = [self.line(number, now) for number in self.states]
        return [line[: max(1, columns - 1)] for line in found]

    def line(self, number: int, now: float) -> str:
        """The line of one rank."""
        state, since = self.states[number]
        for_s = self.ended.get(number, now - since)
        if state == "running" and number in self.waits:
            state, for_s = self.waits[number]
        return f"rank {number}: {state} ({duration(for_s)})"

    def summary(self, now: float) -> str:
        """One line for all ranks."""
        counts = Counter(state.partition(":")[0] for state, _ in self.states.values())
        parts = ", ".join(f"{number} {state}" for state, number in counts.items())
        failed = next((n for n, (state, _) in self.states.items() if "failed" in state), None)
        which = "" if failed is None else f"; rank {failed} {self.states[failed][0]}"
        if failed is None and self.waits:
            first = min(self.waits)
            which = f"; rank {first} {self.waits[first].text}"
        since = min(since for _, since in self.states.values())
        return f"{len(self.states)} ranks: {parts}{which} ({duration(now - since)})"

    def close(self) -> None:
        """Erase the region and end it."""
        self.region.sink.write_over(self.region.erased())
        self.region.sink.erase_below = bytes


def duration(seconds: float) -> str:
    """Format a duration: 3 s, 2 min 5 s or 1 h 2 min."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
