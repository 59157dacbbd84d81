"""The part of a rank's trace kept in memory: a few numbers per collective."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sdp_plugins.trace import trace_file
from sdp_plugins.trace.folder import Found
from sdp_plugins.trace.trace_file import Json


class GroupKey(NamedTuple):
    """Identifies a group; equal on all of its ranks.

    Attributes:
        name: Its name.
        number: Its number among the groups with this name and these members.
        members: Its ranks by their numbers in the job; empty if unknown.
        world_size: Number of ranks.
    """

    name: str
    number: int
    members: tuple[int, ...]
    world_size: int

    def in_job(self, rank: int) -> int:
        """The number of a rank in the job, if known."""
        return self.members[rank] if self.members else rank


class TracedOperation(NamedTuple):
    """A collective on one rank; times are microseconds of its node's clock.

    Attributes:
        name: The collective.
        begin: When it began to run.
        end: When it completed.
        queued: Time from the call until it ran.
        waiting: Time spent waiting for other ranks of its node.
        nbytes: Bytes moved.
        failed: Whether it failed.
    """

    name: str
    begin: float
    end: float
    queued: float
    waiting: float
    nbytes: int
    failed: bool


@dataclass
class RankTrace:
    """One rank's file.

    Attributes:
        path: Path of the file.
        about: Its ``otherData``.
        groups: Each group and this rank in it, by the group's label in the file.
        operations: Collectives by group and sequence number.
        first_us: Begin of its first event.
        shift_us: Offset from its times to those of the merged trace.
    """

    path: Path
    about: Json
    groups: dict[str, tuple[GroupKey, int]]
    operations: dict[GroupKey, dict[int, TracedOperation]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    first_us: float = float("inf")
    shift_us: float = 0.0

    @classmethod
    def read(cls, found: Found) -> RankTrace:
        """Read a rank's trace file.

        Raises:
            ValueError: The file is incomplete or invalid.
        """
        path, about = found
        try:
            groups = {label: _group(group) for label, group in about["groups"].items()}
            trace = cls(path, about, groups)
            for event in trace_file.events(path):
                trace._take(event)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the trace of a rank: {error!r}") from None
        return trace

    def _take(self, event: Json) -> None:
        if "ts" in event:
            self.first_us = min(self.first_us, event["ts"])
        if event["ph"] == "X" and event["cat"] == "collective":
            args = event["args"]
            self.operations[self.groups[args["group"]][0]][args["seq"]] = TracedOperation(
                sys.intern(event["name"]),
                event["ts"],
                event["ts"] + event["dur"],
                args["queued_us"],
                args.get("waiting_us", 0.0),
                args["bytes"],
                "failed" in args,
            )

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return int(self.about["rank"])

    @property
    def clock(self) -> str:
        """The clock of its times."""
        return str(self.about["clock"])

    @property
    def wall_minus_monotonic_us(self) -> float:
        """Wall clock minus that clock, in microseconds."""
        return float(self.about["wall_minus_monotonic_us"])

    @property
    def all_operations(self) -> Iterator[TracedOperation]:
        """The collectives of all groups."""
        return (one for group in self.operations.values() for one in group.values())


def _group(group: Json) -> tuple[GroupKey, int]:
    members = tuple(group["members"] or ())
    return GroupKey(group["name"], group["number"], members, group["world_size"]), group["rank"]


Seen = list[tuple[RankTrace, TracedOperation]]
"""A collective, as each of the ranks recorded it."""


def together(traces: Iterable[RankTrace]) -> Iterator[tuple[GroupKey, int, Seen]]:
    """Each collective with the ranks' records, in the order of groups and sequence numbers."""
    for key in sorted({key for trace in traces for key in trace.operations}):
        members = [(trace, trace.operations[key]) for trace in traces if key in trace.operations]
        for seq in sorted({seq for _, operations in members for seq in operations}):
            yield key, seq, [(t, operations[seq]) for t, operations in members if seq in operations]
