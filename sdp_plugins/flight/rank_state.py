"""What a rank was doing at one moment: a snapshot also shows what came after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdp_plugins.core.rank_info import Forming
from sdp_plugins.core.trace_event import FAILED, TraceEvent
from sdp_plugins.flight.rank_snapshot import RankSnapshot


class RankState(NamedTuple):
    """A rank of a group at a moment.

    Attributes:
        snapshot: What the rank shows.
        at_ns: The moment, by the rank's clock.
        current: The collective that is running; None: none is.
        queued: The collectives behind it.
        messages: The sends and receives that are not complete.
        in_step: Whether ranks of this node are in a step of a larger group's operation.
        last: The operation that completed last; None: none did.
        begun: Sequence number of the last collective that the rank began; 0: none.
    """

    snapshot: RankSnapshot
    at_ns: int
    current: TraceEvent | None
    queued: tuple[TraceEvent, ...]
    messages: tuple[TraceEvent, ...]
    in_step: bool
    last: TraceEvent | None
    begun: int

    @property
    def rank(self) -> int:
        """The rank in the group."""
        return self.snapshot.info.rank

    @property
    def process(self) -> tuple[str, str]:
        """Host and process."""
        return self.snapshot.info.host, self.snapshot.info.process

    @property
    def forming(self) -> Forming | None:
        """The group that the process was making."""
        found = self.snapshot.forming
        over = self.snapshot.liveness == "ended" or self.snapshot.state == "left"
        return None if found is None or found.since_ns > self.at_ns or over else found

    @property
    def gone(self) -> bool:
        """Whether the process has ended or is stopped, and has not left the group."""
        return self.snapshot.liveness in ("ended", "stopped") and self.snapshot.state == "open"

    @property
    def waits(self) -> bool:
        """Whether an operation is not complete."""
        return bool(self.current or self.queued or self.messages)


def rank_states(snapshots: Sequence[RankSnapshot]) -> dict[int, RankState]:
    """The ranks of a group: when it failed, or when each was read.

    What ranks do after the first of them has given up does not show why.
    """
    end: dict[str, int] = {}
    for snapshot in snapshots:
        for event in (*snapshot.operations, *snapshot.messages):
            if event.flags & FAILED and event.finished:
                clock = snapshot.info.clock
                end[clock] = min(end.get(clock, event.finished), event.finished)
    return {s.info.rank: rank_state(s, end.get(s.info.clock, s.read_ns)) for s in snapshots}


def rank_state(snapshot: RankSnapshot, at_ns: int) -> RankState:
    """What a rank was doing at a moment."""
    begun = [event for event in snapshot.operations if 0 < event.started <= at_ns]
    done = [event for event in begun if _done(event, at_ns)]
    sent = [event for event in snapshot.messages if _done(event, at_ns)]
    running = [event for event in begun if not _done(event, at_ns)]
    return RankState(
        snapshot,
        at_ns,
        max(running, key=lambda event: event.started, default=None),
        tuple(_incomplete(snapshot.operations, at_ns, begun=False)),
        tuple(_incomplete(snapshot.messages, at_ns, begun=True)),
        any(_incomplete(snapshot.steps, at_ns, begun=True)),
        max((*done, *sent), key=lambda event: event.finished, default=None),
        max((event.seq for event in begun), default=0),
    )


def _incomplete(events: Iterable[TraceEvent], at_ns: int, *, begun: bool) -> Iterable[TraceEvent]:
    for event in events:
        waiting = not 0 < event.started <= at_ns
        if event.issued <= at_ns and (begun or waiting) and not _done(event, at_ns):
            yield event


def _done(event: TraceEvent, at_ns: int) -> bool:
    return 0 < event.finished < at_ns
