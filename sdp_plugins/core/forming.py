"""A group whose ranks are still meeting, as the segments of this process's open groups show it."""

from __future__ import annotations

import json
from typing import NamedTuple

from .rank_info import MOST_CHARS, to_runs
from .rank_names import RankNames

_MOST_MEMBERS_CHARS = 120  # of the 248 bytes that a segment has; the name takes what is left


class Forming(NamedTuple):
    """A group that this process is making.

    Attributes:
        name: The group's name.
        world_size: The group's size.
        since_ns: When this process began, by CLOCK_MONOTONIC.
        members: The global ranks of its members; None: not known, or too long for a segment.
    """

    name: str
    world_size: int
    since_ns: int
    members: tuple[int, ...] | None = None

    @property
    def names(self) -> RankNames:
        """How messages name the group and its ranks."""
        return RankNames(self.name, self.world_size, self.members)

    def pack(self) -> bytes:
        """The text for a segment, which cuts a long name."""
        members = json.dumps(to_runs(self.members or ()), separators=(",", ":"))
        if len(members) > _MOST_MEMBERS_CHARS:
            members = "[]"
        return f"{self.world_size} {members} {self.name[:MOST_CHARS]}".encode(errors="replace")
