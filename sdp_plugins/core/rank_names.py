"""The names of a group and its ranks in messages: by the numbers in the job, if known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT = "default"
"""Default name of the group of all ranks of a job."""
_MOST_CHARS = 60


def printable(text: str, most: int) -> str:
    """Make a peer's text safe for one line of a terminal, and cut it."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks for a message, runs of three and more as a range: ``ranks 1, 4-6``."""
    ordered = sorted(set(ranks))
    parts: list[str] = []
    for first, count in to_runs(ordered):
        run = range(first, first + count)
        parts += [f"{run[0]}-{run[-1]}"] if count > 2 else map(str, run)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts) or '(none)'}"


def to_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks as runs of consecutive numbers, each its first rank and its length."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([rank, 1])
    return found


@dataclass(frozen=True)
class RankNames:
    """The names of a group, for messages.

    Attributes:
        group: Its name.
        world_size: Number of its ranks.
        global_ranks: Their numbers in the job; None: not known, so they are called as in the group.
    """

    group: str
    world_size: int
    global_ranks: tuple[int, ...] | None = None

    def global_rank(self, rank: int) -> int:
        """What a rank is called. A peer may have written any number."""
        if self.global_ranks is None or not 0 <= rank < self.world_size:
            return rank
        return self.global_ranks[rank]

    def list(self, ranks: Iterable[int]) -> str:
        """Such as ``ranks 1, 4-6``."""
        return name_ranks(map(self.global_rank, ranks))

    @property
    def members(self) -> str:
        """All of them; ``4 ranks`` where their numbers would tell nothing."""
        if self.global_ranks is None or self._is_job:
            return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return self.list(range(self.world_size))

    @property
    def _is_job(self) -> bool:
        whole = self.global_ranks in (None, tuple(range(self.world_size)))
        return whole and self.group == DEFAULT

    def error_prefix(self, rank: int) -> str:
        """How a rank's messages begin: ``[rank 3/8] ``, or the like of other groups."""
        if self._is_job:
            return f"[rank {rank}/{self.world_size}] "
        name = printable(self.group, _MOST_CHARS)
        if self.global_ranks is None:
            return f"[rank {rank}/{self.world_size} in group {name}] "
        members = self.members
        if len(members) > _MOST_CHARS:
            members = f"{members[: members.rindex(',', 0, _MOST_CHARS)]}, ..."
        return f"[rank {self.global_rank(rank)} in group {name} ({members})] "
