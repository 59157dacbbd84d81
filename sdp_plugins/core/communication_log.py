"""What a program's logs say of this rank's communication."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group

NOTICEABLE = 0.05
"""Ranks wait for a straggler for at least this part of the time."""


def straggler_of(awaited: Mapping[int, float]) -> int | None:
    """The rank for which the others have waited longest; None: for none noticeably longer.

    In a balanced job chance decides who comes last, and each rank is waited for about as long.

    Args:
        awaited: The part of the time for which they have waited for each rank, from 0 to 1.
    """
    *_, second, latest = [0.0, *sorted(awaited.values())]
    if latest < NOTICEABLE or latest < 2 * second:
        return None
    return max(awaited, key=lambda rank: awaited[rank])


class CommunicationLog:
    """Compares the counters of a group with those of the last look; not a collective.

    Args:
        group: The group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._at_ns = time.monotonic_ns()
        self._counted = group.counters()

    def look(self) -> dict[str, float]:
        """What has happened since the last look.

        Returns:
            ``smddp/communication_share``: the part of the time that this rank was in collectives;
            it may have computed meanwhile. ``smddp/waiting_share``: the part of the time that it
            waited for other ranks of its node to begin them. ``smddp/bytes_per_second``.
            ``smddp/straggler``: the rank of this node for which others have waited longest; -1: for
            none noticeably.
        """
        now_ns, counted = time.monotonic_ns(), self.group.counters()
        took_ns = max(1, now_ns - self._at_ns)
        done = {rank: now.since(self._counted[rank]) for rank, now in counted.items()}
        self._at_ns, self._counted = now_ns, counted
        mine = done[self.group.rank]
        latest = straggler_of({rank: each.awaited_ns / took_ns for rank, each in done.items()})
        return {
            "smddp/communication_share": min(1.0, mine.busy_ns / took_ns),
            "smddp/waiting_share": min(1.0, mine.waiting_ns / took_ns),
            "smddp/bytes_per_second": (mine.nbytes + mine.message_nbytes) * 1e9 / took_ns,
            "smddp/straggler": float(-1 if latest is None else self.group.global_rank(latest)),
        }
