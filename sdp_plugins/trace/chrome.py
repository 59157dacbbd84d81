"""A rank's events as a Chrome trace: one process per rank, lanes as its threads.

The format is that of "Trace Event Format", which Perfetto and chrome://tracing read. Times are
microseconds of this node's CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sdp_plugins.core import _native
from sdp_plugins.core.rank_info import RankInfo
from sdp_plugins.core.trace_event import ASYNC, COMPARE, FAILED, STEP, TraceEvent
from sdp_plugins.trace.trace_file import Json


@dataclass(frozen=True)
class RecordedGroup:
    """What was recorded of one group on this rank.

    Attributes:
        name: The group's name.
        info: This rank of it.
        number: The group is the n-th of this name and these members in the trace.
        label: The name, with a number if it is not the first of this name in this process.
        events: The group's operations on this rank.
        dropped: Number of earlier operations that were dropped for lack of room.
        failure: Why the group failed; empty if it did not.
        read: When the events were read; operations that are not complete are drawn until then.
    """

    name: str
    info: RankInfo
    number: int
    label: str
    events: Sequence[TraceEvent] = ()
    dropped: int = 0
    failure: str = ""
    read: int = 0

    @property
    def about(self) -> Json:
        """What identifies the group on all its ranks, and this rank in it."""
        return {
            "name": self.name,
            "members": self.info.members,
            "number": self.number,
            "rank": self.info.rank,
            "world_size": self.info.world_size,
        }


@dataclass(frozen=True)
class Span:
    """A part of the program, such as a step or a backward pass."""

    name: str
    begin: int
    end: int
    thread: str


class Lanes:
    """The threads of a trace: as many of each name as keep slices from overlapping."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ends: dict[str, list[int]] = {}
        self._tids: dict[tuple[str, int], int] = {}
        self.events: list[Json] = []

    def slice(self, lane: str, name: str, cat: str, begin: int, end: int, args: Json) -> int:
        """Draw a slice; slices of a lane must come in the order in which they begin.

        Returns:
            The thread in which it is drawn.
        """
        ends = self._ends.setdefault(lane, [])
        row = next((row for row, other in enumerate(ends) if other <= begin), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        return self.inner(self._tid(lane, row), name, cat, begin, end, args)

    def inner(self, tid: int, name: str, cat: str, begin: int, end: int, args: Json) -> int:
        """Draw a slice inside an existing one."""
        self.events.append(
            {
                "name": name,
                "cat": cat,
                "ph": "X",
                "ts": begin / 1000,
                "dur": max(0, end - begin) / 1000,
                "pid": self._pid,
                "tid": tid,
                "args": args,
            }
        )
        return tid

    def _tid(self, lane: str, row: int) -> int:
        if (lane, row) not in self._tids:
            tid = self._tids[lane, row] = len(self._tids) + 1
            name = f"{lane} ({row + 1})" if row else lane
            self.events.append(metadata("thread_name", self._pid, tid, name=name))
            self.events.append(metadata("thread_sort_index", self._pid, tid, sort_index=tid))
        return self._tids[lane, row]


def metadata(kind: str, pid: int, tid: int = 0, /, **args: Any) -> Json:
    """A metadata event."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def draw(
    rank: int, host: str, groups: Sequence[RecordedGroup], spans: Iterable[Span]
) -> list[Json]:
    """All events of a rank's trace."""
    lanes = Lanes(rank)
    lanes.events += [
        metadata("process_name", rank, name=f"rank {rank} ({host})"),
        metadata("process_sort_index", rank, sort_index=rank),
    ]
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        lanes.slice(f"program: {span.thread}", span.name, "span", span.begin, span.end, {})
    for group in groups:
        _draw_group(lanes, group)
    return lanes.events


def _draw_group(lanes: Lanes, group: RecordedGroup) -> None:
    begun = (event for event in group.events if event.started)
    for event in sorted(begun, key=lambda event: event.started):
        _draw_running(lanes, group, event)
    for event in sorted(group.events, key=lambda event: event.issued):
        started = event.started or group.read
        if started > event.issued:
            lane = f"{_lane(group, event)}, queued"
            lanes.slice(lane, event.name, "queued", event.issued, started, {"seq": event.seq})
    waited = (event for event in group.events if event.flags & ASYNC and event.waited)
    for event in sorted(waited, key=lambda event: event.waited):
        lane = f"{group.label}, callers wait"
        args = {"seq": event.seq, "thread": _thread(event.waiter, group.info)}
        begin = min(event.waited, event.finished)
        lanes.slice(lane, f"wait for {event.name}", "wait", begin, event.finished, args)


def _draw_running(lanes: Lanes, group: RecordedGroup, event: TraceEvent) -> None:
    cat = "step" if event.flags & STEP else "message" if event.between_two else "collective"
    name = "compare" if event.flags & COMPARE else event.name
    args = _arguments(group, event)
    end = event.finished or group.read
    tid = lanes.slice(_lane(group, event), name, cat, event.started, end, args)
    if event.arrived > event.started and event.last_rank != group.info.rank:
        # The rank that arrived last, or did not arrive.
        who = f"waits for rank {group.info.global_rank_of(event.last_rank)}"
        lanes.inner(tid, who, "late", event.started, min(event.arrived, end), {})


def _lane(group: RecordedGroup, event: TraceEvent) -> str:
    if event.flags & STEP:
        return f"{group.label}, steps in the node"
    return f"{group.label}, send and receive" if event.between_two else group.label


def _arguments(group: RecordedGroup, event: TraceEvent) -> Json:
    args: Json = {
        "group": group.label,
        "seq": event.seq,
        "data": event.shape,
        "bytes": event.nbytes,
        "queued_us": (event.started - event.issued) / 1000,
        "runs in": _where(event),
        "thread": _thread(event.thread, group.info),
    }
    if not event.finished:
        args["unfinished"] = True
    if event.nbytes and _native.reduces(_native.Op(event.op)):
        args["reduction"] = _native.ReduceOp(event.reduce_op).name
    if event.layout:
        args["fusion buffer"] = f"{event.layout:08x}"
    if event.peer >= 0 and not event.flags & STEP:  # which counts the ranks of its node
        args["peer" if event.between_two else "root"] = group.info.global_rank_of(event.peer)
    if event.between_two:
        args["tag"] = event.tag
    if event.path:
        args["path"] = _native.path_name(event.path)
    if event.arrived:
        args["waiting_us"] = max(0, event.arrived - event.started) / 1000
    if event.flags & FAILED:
        args["failed"] = group.failure or True
        if event.blamed >= 0:
            args["blamed"] = f"rank {group.info.global_rank_of(event.blamed)}"
    elif event.last_rank >= 0:
        args["last to arrive"] = f"rank {group.info.global_rank_of(event.last_rank)}"
    return args


def _where(event: TraceEvent) -> str:
    if not event.flags & ASYNC:
        return "the caller's thread"
    return "the messages' thread" if event.between_two else "the engine's thread"


def _thread(tid: int, info: RankInfo) -> str:
    return "main" if tid == info.pid else str(tid)
