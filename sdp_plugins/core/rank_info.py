"""What a segment says of its rank to readers outside of the group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _native
from .rank_names import RankNames, to_runs

MOST_CHARS = 200  # of a name in a segment
_MOST_MEMBERS_CHARS = 120  # of the 248 bytes for a Forming; the rest is for the name


class RankInfo(NamedTuple):
    """One rank of one group.

    Attributes:
        token: Identifies the group; equal on all its ranks.
        name: The group's name.
        rank: The rank in the group.
        world_size: The group's size.
        members: The global ranks of the group's members; None if unknown.
        job: Key of the job; empty if unknown.
        process: ``pid@start``.
        pid_namespace: The namespace of that pid; 0 if unknown.
        host: The host's name.
        clock: Id of the process's CLOCK_MONOTONIC: see ``clock_id``.
    """

    token: int
    name: str
    rank: int
    world_size: int
    members: tuple[int, ...] | None
    job: str
    process: str
    pid_namespace: int
    host: str
    clock: str

    @property
    def pid(self) -> int:
        """Process id, in the process's own namespace."""
        return int(self.process.partition("@")[0])

    @property
    def global_rank(self) -> int:
        """The rank in the job, or in the group if the job's ranks are not known."""
        return self.global_rank_of(self.rank)

    def global_rank_of(self, rank: int) -> int:
        """The rank in the job of a rank of the group, if that is known."""
        return self.names.global_rank(rank)

    @property
    def names(self) -> RankNames:
        """The names of the group and its ranks in messages."""
        return RankNames(self.name, self.world_size, self.members)

    def to_json(self) -> dict[str, Any]:
        """The fields, as segments and report files hold them."""
        members = None if self.members is None else to_runs(self.members)
        return self._asdict() | {"members": members}

    def pack(self) -> bytes:
        """The text for the segment."""
        short = self._replace(name=self.name[:MOST_CHARS], job=self.job[:MOST_CHARS])
        text = json.dumps(short.to_json()).encode()
        if len(text) >= _native.FLIGHT_RANK_INFO_BYTES:  # members in no order
            text = json.dumps(short._replace(members=None).to_json()).encode()
        return text


class Forming(NamedTuple):
    """A group that the rank's process is making, and that has no segment yet.

    Attributes:
        names: The names of the group and its ranks.
        since_ns: When this process began, by CLOCK_MONOTONIC.
    """

    names: RankNames
    since_ns: int

    def to_json(self) -> list[Any]:
        """The fields, as report files hold them."""
        names = self.names
        return [names.group, names.world_size, self.since_ns, to_runs(names.global_ranks or ())]

    def pack(self) -> bytes:
        """The text for the segment; a long name is cut, many members are left out."""
        name, size, _, runs = self.to_json()
        members = json.dumps(runs, separators=(",", ":"))
        if len(members) > _MOST_MEMBERS_CHARS:
            members = "[]"
        return f"{size} {members} {name[:MOST_CHARS]}".encode(errors="replace")


def group_token(announcements: Iterable[bytes]) -> int:
    """A group's token, a hash of its ranks' announcements."""
    digest = hashlib.sha256(b"".join(announcements)).digest()
    return int.from_bytes(digest[:7], "little") + 1  # fits JSON's numbers, and is not 0
