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
    """

    name: str
    world_size: int
    since_ns: int

    def text(self) -> bytes:
        """For a segment, which has place for a part of a long name."""
        return f"{self.world_size} {self.name[:MOST_CHARS]}".encode(errors="replace")

    @classmethod
    def unpack(cls, raw: bytes) -> Meeting | None:
        """Read what anybody may have written; None if there is no meeting."""
        since_ns, text = _LAYOUT.unpack(raw)
        size, _, name = text.partition(b"\0")[0].decode(errors="ignore").partition(" ")
        try:
            return cls.from_json([name, int(size), since_ns]) if since_ns else None
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
        kinds = zip(cls._fields, (str, int, int), found, strict=True)
        meeting = cls(*(checked(name, kind, value) for name, kind, value in kinds))
        if not all(0 < number <= _MOST for number in meeting[1:]):
            raise ValueError("it is no group that is being made")
        return meeting
