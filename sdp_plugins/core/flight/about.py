"""Whose a segment is: a text in it, for those who were not at the rendezvous."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from .. import _native
from ..rank_names import RankNames
from ..trace.naming import clock
from .untrusted import MOST_CHARS, MOST_RANKS, checked, from_runs, runs


class About(NamedTuple):
    """A rank's place in a group.

    Attributes:
        token: Of the group; equal on all its ranks, and no other group has it.
        name: The group's.
        rank: In the group.
        world_size: The group's.
        members: Its ranks by those of the job; None: not known.
        job: What tells the job from others; empty: not known.
        process: ``pid@start``.
        pids: Of the namespace in which that id means something.
        host: Its name.
        clock: Equal where times can be compared.
    """

    token: int
    name: str
    rank: int
    world_size: int
    members: tuple[int, ...] | None
    job: str
    process: str
    pids: int
    host: str
    clock: str

    @property
    def pid(self) -> int:
        """Process id, in its own namespace."""
        return int(self.process.partition("@")[0])

    @property
    def job_rank(self) -> int:
        """Rank in the job, or in the group if that is all that is known."""
        return self.shown(self.rank)

    def shown(self, rank: int) -> int:
        """A rank of the group by its number in the job, if that is known."""
        return self.names.number(rank)

    @property
    def names(self) -> RankNames:
        """How messages name its ranks."""
        return RankNames(self.name, self.world_size, self.members)

    def to_json(self) -> dict[str, Any]:
        """As a report has it."""
        members = None if self.members is None else runs(self.members)
        return self._asdict() | {"members": members}

    def pack(self) -> bytes:
        """The text for the segment."""
        short = self._replace(name=self.name[:MOST_CHARS], job=self.job[:MOST_CHARS])
        text = json.dumps(short.to_json()).encode()
        if len(text) >= _native.FLIGHT_ABOUT_BYTES:  # members in no order
            text = json.dumps(short._replace(members=None).to_json()).encode()
        return text

    @classmethod
    def from_json(cls, found: Any) -> About:
        """Read what anybody may have written.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(found, dict):
            raise ValueError("it says nothing of itself")
        values = {name: checked(name, kind, found.get(name)) for name, kind in _KINDS.items()}
        about = cls(members=None, **values)
        number, _, _ = about.process.partition("@")
        fits = (
            0 <= about.rank < about.world_size <= MOST_RANKS
            and number.isdecimal()
            and number.isascii()
        )
        if not fits or len(number) > 10:
            raise ValueError(f"it says that it is rank {about.rank} of {about.world_size}")
        return about._replace(members=from_runs(found.get("members"), about.world_size))

    @classmethod
    def unpack(cls, text: bytes) -> About:
        """Read a segment's text.

        Raises:
            ValueError: It is none.
        """
        try:
            return cls.from_json(json.loads(text.partition(b"\0")[0].decode()))
        except RecursionError as error:
            raise ValueError("it says nothing of itself") from error


_KINDS: dict[str, type] = {
    "token": int,
    "name": str,
    "rank": int,
    "world_size": int,
    "job": str,
    "process": str,
    "pids": int,
    "host": str,
    "clock": str,
}


def token_of(announcements: Iterable[bytes]) -> int:
    """A group's token, from what its ranks have told each other."""
    digest = hashlib.sha256(b"".join(announcements)).digest()
    return int.from_bytes(digest[:7], "little") + 1  # fits JSON's numbers, and is not 0


def pid_namespace() -> int:
    """Names the namespace of process ids; 0: not known."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def clock_here() -> str:
    """Names the clock of the times that are recorded here."""
    return clock()
