"""Who is in a job, and who goes on when some are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .handle import Handle


class Member(NamedTuple):
    """A rank of the job.

    Attributes:
        number: Its number in the job, which it keeps; a replacement may have that of a lost rank.
        handle: Its address.
    """

    number: int
    handle: Handle


@dataclass(frozen=True)
class Roster:
    """The ranks of a job at a time.

    Attributes:
        view: Counts the rosters of a job.
        members: By number. A member's index is its rank.
    """

    view: int
    members: tuple[Member, ...]

    @property
    def handles(self) -> list[Handle]:
        """Those of all members."""
        return [member.handle for member in self.members]

    def has_quorum(self, present: Collection[Handle], dead: Collection[Handle]) -> bool:
        """Whether some members may go on without those that are silent.

        Members whose processes have ended have no say. Of the others, more than half are enough, or
        half of them with the lowest: so no two parts of a job go on, each without the other.

        Args:
            present: Those that would go on.
            dead: Those whose processes are known to have ended.
        """
        living = [handle for handle in self.handles if handle not in dead]
        n_present = sum(handle in present for handle in living)
        if 2 * n_present == len(living):
            return n_present > 0 and living[0] in present
        return 2 * n_present > len(living)

    def next(self, present: Collection[Handle], joining: Iterable[Member]) -> Roster:
        """The roster of those that are present, and of those that join.

        One that joins has its number, unless another has it: then the lowest that is free.
        """
        staying = {m.number: m for m in self.members if m.handle in present}
        for newcomer in sorted(joining):
            number = newcomer.number
            if number in staying or number < 0:
                number = min(set(range(len(staying) + 1)) - staying.keys())
            staying[number] = Member(number, newcomer.handle)
        return Roster(self.view + 1, tuple(staying[number] for number in sorted(staying)))

    def to_json(self) -> Any:
        """The roster as JSON has it."""
        return [self.view, [[member.number, str(member.handle)] for member in self.members]]

    @classmethod
    def from_json(cls, data: Any) -> Roster:
        """Read what ``to_json`` returned.

        Raises:
            ValueError, TypeError: The data are something else.
        """
        view, members = data
        read = tuple(Member(int(number), Handle.parse(handle)) for number, handle in members)
        return cls(int(view), read)
