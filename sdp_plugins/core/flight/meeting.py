"""A group that is being made, as the segments of its ranks' other groups tell of it."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from .. import _native
from ..rank_names import RankNames
from .untrusted import MOST_CHARS, MOST_RANKS, checked, from_runs, runs

_LAYOUT = struct.Struct(f"<Q{_native.FLIGHT_MEETING_BYTES}s")
NBYTES = _LAYOUT.size
_MOST = 2**63 - 1
_MOST_MEMBERS = 120
"""Characters of the members' list: the rest of the room is the name's."""


class Meeting(NamedTuple):
    """What a process waits for that makes a group.

    Attributes:
        name: The group's.
        world_size: The group's.
        since_ns: When it began, by the rank's clock.
        until_ns: When it failed; 0: it goes on.
        others: How many more groups the process makes at the same time, in other threads.
        members: Its ranks by those of the job; None: not known, or there was no room.
    """

    name: str
    world_size: int
    since_ns: int
    until_ns: int = 0
    others: int = 0
    members: tuple[int, ...] | None = None

    @property
    def names(self) -> RankNames:
        """How messages name its ranks."""
        return RankNames(self.name, self.world_size, self.members)

    def text(self) -> bytes:
        """For a segment, which has place for a part of a long name."""
        members = json.dumps(runs(self.members or ()), separators=(",", ":"))
        if len(members) > _MOST_MEMBERS:
            members = "[]"
        numbers = f"{self.world_size} {self.until_ns} {self.others}"
        return f"{numbers} {members} {self.name[:MOST_CHARS]}".encode(errors="replace")

    def to_json(self) -> list[Any]:
        """As a report has it."""
        return [*self[:-1], None if self.members is None else runs(self.members)]

    @classmethod
    def unpack(cls, raw: bytes) -> Meeting | None:
        """Read what anybody may have written; None if there is no meeting."""
        since_ns, text = _LAYOUT.unpack(raw)
        parts = text.partition(b"\0")[0].decode(errors="ignore").split(" ", 4)
        try:
            *numbers, members, name = parts
            size, until_ns, others = map(int, numbers)
            fields = [name, size, since_ns, until_ns, others, json.loads(members)]
            return cls.from_json(fields) if since_ns else None
        except (ValueError, RecursionError):
            return None

    @classmethod
    def from_json(cls, found: Any) -> Meeting | None:
        """Read what a report says; None if there was no meeting.

        Raises:
            ValueError: It is something else.
        """
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != len(cls._fields):
            raise ValueError("it is no group that is being made")
        kinds = zip(cls._fields, (str, *[int] * 4), found, strict=False)
        meeting = cls(*(checked(name, kind, value) for name, kind, value in kinds))
        sane = all(0 <= number <= _MOST for number in meeting[1:-1])
        if not (sane and 0 < meeting.world_size <= MOST_RANKS and meeting.since_ns):
            raise ValueError("it is no group that is being made")
        return meeting._replace(members=from_runs(found[-1], meeting.world_size))
