"""A group that is being made, as the segments of this process's open groups show it."""

from __future__ import annotations

import json
from typing import NamedTuple

from .rank_info import MOST_CHARS, to_runs
from .rank_names import RankNames

_MOST_MEMBERS_CHARS = 120  # of the 248 bytes in a segment; the rest is for the name


class Forming(NamedTuple):
    """A group that this process is making.

    Attributes:
        name: The group's name.
        world_size: The group's size.
        since_ns: When this process began, by CLOCK_MONOTONIC.
        members: The global ranks of its members; None if unknown, or too many for a segment.
    """

    name: str
    world_size: int
    since_ns: int
    members: tuple[int, ...] | None = None

    @property
    def names(self) -> RankNames:
        """The names of the group and its ranks in messages."""
        return RankNames(self.name, self.world_size, self.members)

    def pack(self) -> bytes:
        """The text for a segment; a long name is cut."""
        members = json.dumps(to_runs(self.members or ()), separators=(",", ":"))
        if len(members) > _MOST_MEMBERS_CHARS:
            members = "[]"
        return f"{self.world_size} {members} {self.name[:MOST_CHARS]}".encode(errors="replace")
