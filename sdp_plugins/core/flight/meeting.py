"""A group that is being made, as the segments of its ranks' other groups tell of it."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from .. import _native
from .untrusted import MOST_CHARS, checked

_LAYOUT = struct.Struct(f"<Q{_native.FLIGHT_MEETING_BYTES}s")
NBYTES = _LAYOUT.size
_MOST = 2**63 - 1


class Meeting(NamedTuple):
    """What a process waits for that makes a group.

    Attributes:
        name: The group's.
        world_size: The group's.
        since_ns: When it began, by the rank's clock.
        until_ns: When it failed; 0: it goes on.
        others: How many more groups the process makes at the same time, in other threads.
    """

    name: str
    world_size: int
    since_ns: int
    until_ns: int = 0
    others: int = 0

    def text(self) -> bytes:
        """For a segment, which has place for a part of a long name."""
        text = f"{self.world_size} {self.until_ns} {self.others} {self.name[:MOST_CHARS]}"
        return text.encode(errors="replace")

    @classmethod
    def unpack(cls, raw: bytes) -> Meeting | None:
        """Read what anybody may have written; None if there is no meeting."""
        since_ns, text = _LAYOUT.unpack(raw)
        parts = text.partition(b"\0")[0].decode(errors="ignore").split(" ", 3)
        try:
            *numbers, name = parts
            size, until_ns, others = map(int, numbers)
            return cls.from_json([name, size, since_ns, until_ns, others]) if since_ns else None
        except ValueError:
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
        kinds = zip(cls._fields, (str, *[int] * 4), found, strict=True)
        meeting = cls(*(checked(name, kind, value) for name, kind, value in kinds))
        sane = all(0 <= number <= _MOST for number in meeting[1:])
        if not (sane and meeting.world_size and meeting.since_ns):
            raise ValueError("it is no group that is being made")
        return meeting
