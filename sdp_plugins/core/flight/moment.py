"""What a rank was at, at one moment: what it shows goes on after that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..trace.events import FAILED, Event
from .meeting import Meeting
from .sheet import Sheet


class Moment(NamedTuple):
    """A rank of a group at a moment.

    Attributes:
        sheet: What it shows.
        at_ns: The moment, by its clock.
        current: The collective that runs; None: none does.
        queued: Collectives behind it.
        messages: Sends and receives that are not done.
        in_step: Whether a larger group's operation is at its ranks of this node.
        last: The operation that was done last; None: none was.
        begun: Number of the last collective that it has begun; 0: none.
    """

    sheet: Sheet
    at_ns: int
    current: Event | None
    queued: tuple[Event, ...]
    messages: tuple[Event, ...]
    in_step: bool
    last: Event | None
    begun: int

    @property
    def rank(self) -> int:
        """In the group."""
        return self.sheet.about.rank

    @property
    def process(self) -> tuple[str, str]:
        """Host and process."""
        return self.sheet.about.host, self.sheet.about.process

    @property
    def meeting(self) -> Meeting | None:
        """The group that its process was making."""
        found = self.sheet.meeting
        if found is None or found.since_ns > self.at_ns:
            return None
        over = self.at_ns >= found.until_ns if found.until_ns else self.sheet.life == "ended"
        return None if over or self.sheet.state == "left" else found

    @property
    def vain_meeting(self) -> Meeting | None:
        """The group that it could not make, unless it has gone on since."""
        found = self.sheet.meeting
        if found is None or not 0 < found.until_ns <= self.at_ns:
            return None
        later = [e for e in (self.last, self.current) if e and e.started > found.until_ns]
        return None if later else found

    @property
    def gone(self) -> bool:
        """Whether its process has ended, or is stopped, and has not left the group."""
        return self.sheet.life in ("ended", "stopped") and self.sheet.state == "open"

    @property
    def waits(self) -> bool:
        """Whether something of it is not done."""
        return bool(self.current or self.queued or self.messages)


def moments(sheets: Sequence[Sheet]) -> dict[int, Moment]:
    """The ranks of a group: when it failed, or when each was read.

    What they do after the first of them has given up would not tell why.
    """
    end: dict[str, int] = {}
    for sheet in sheets:
        for event in (*sheet.operations, *sheet.messages):
            if event.flags & FAILED and event.finished:
                clock = sheet.about.clock
                end[clock] = min(end.get(clock, event.finished), event.finished)
    return {s.about.rank: moment(s, end.get(s.about.clock, s.read_ns)) for s in sheets}


def moment(sheet: Sheet, at_ns: int) -> Moment:
    """What a rank was at."""
    begun = [event for event in sheet.operations if 0 < event.started <= at_ns]
    done = [event for event in begun if _done(event, at_ns)]
    sent = [event for event in sheet.messages if _done(event, at_ns)]
    running = [event for event in begun if not _done(event, at_ns)]
    return Moment(
        sheet,
        at_ns,
        max(running, key=lambda event: event.started, default=None),
        tuple(_open(sheet.operations, at_ns, begun=False)),
        tuple(_open(sheet.messages, at_ns, begun=True)),
        any(_open(sheet.steps, at_ns, begun=True)),
        max((*done, *sent), key=lambda event: event.finished, default=None),
        max((event.seq for event in begun), default=0),
    )


def _open(events: Iterable[Event], at_ns: int, *, begun: bool) -> Iterable[Event]:
    for event in events:
        waiting = not 0 < event.started <= at_ns
        if event.issued <= at_ns and (begun or waiting) and not _done(event, at_ns):
            yield event


def _done(event: Event, at_ns: int) -> bool:
    return 0 < event.finished < at_ns
