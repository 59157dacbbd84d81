"""What the ranks of a job have done between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sdp_plugins.core.communication_log import straggler_of
from sdp_plugins.flight.describe_rank import Groups
from sdp_plugins.flight.rank_state import RankState
from sdp_plugins.flight.waits import waits
from sdp_plugins.top.steps import operations_per_step

_LONG_NS = 10**8
"""Ranks are not read at the same moment: shorter waits that last may not be any."""


class RankFigures(NamedTuple):
    """One rank of a group.

    Attributes:
        state: What the rank shows now.
        operations: Collectives and messages a second.
        steps: Steps a second: see `operations_per_step`; None: not known.
        nbytes: Bytes a second.
        busy: The part of the time in collectives, from 0 to 1.
        waiting: The part of the time in which it has waited for other ranks to come to them.
        awaited: The part of the time in which other ranks have waited for this one to come.
    """

    state: RankState
    operations: float
    steps: float | None
    nbytes: float
    busy: float
    waiting: float
    awaited: float


class GroupFigures(NamedTuple):
    """A group.

    Attributes:
        token: Identifies it.
        ranks: Its ranks that were read twice or now for the first time, by rank.
        straggler: The rank for which the others have waited longest; None: for none noticeably.
    """

    token: int
    ranks: Mapping[int, RankFigures]
    straggler: int | None

    @property
    def idle(self) -> bool:
        """Whether its ranks have done nothing, and do nothing."""
        return not any(
            figures.operations or figures.state.waits or figures.state.gone
            for figures in self.ranks.values()
        )


class _Pending(NamedTuple):
    """How much a rank's counters lack because an operation is not complete, in nanoseconds."""

    busy: int = 0
    waiting: int = 0
    awaited: int = 0


def figures_of(earlier: Groups, now: Groups) -> list[GroupFigures]:
    """Compare two readings of a job; the busiest groups come first."""
    found = [_of_group(token, earlier.get(token, {}), group) for token, group in now.items()]
    return sorted(found, key=lambda group: (-_work(group), group.token))


def _work(group: GroupFigures) -> float:
    return sum(figures.busy for figures in group.ranks.values())


def _of_group(
    token: int, before: Mapping[int, RankState], now: Mapping[int, RankState]
) -> GroupFigures:
    then, pending = _pending(before), _pending(now)
    ranks = {
        rank: _of_rank(before.get(rank), state, then.get(rank, _Pending()), pending[rank])
        for rank, state in sorted(now.items())
    }
    awaited = {rank: figures.awaited for rank, figures in ranks.items()}
    return GroupFigures(token, ranks, straggler_of(awaited) if len(ranks) > 1 else None)


def _of_rank(
    before: RankState | None, now: RankState, then: _Pending, pending: _Pending
) -> RankFigures:
    if before is None or before.process != now.process or now.at_ns <= before.at_ns:
        return RankFigures(now, 0, None, 0, 0, 0, 0)
    took_ns = now.at_ns - before.at_ns
    done = now.snapshot.counters.since(before.snapshot.counters)

    def part(counted_ns: int, lacked_ns: int, lacks_ns: int) -> float:
        return min(1.0, max(0.0, (counted_ns + lacks_ns - lacked_ns) / took_ns))

    # Read while it counts: what it waits may be counted before the operation that waits.
    waiting = part(done.waiting_ns, then.waiting, pending.waiting)
    length = operations_per_step(now.snapshot.operations) if done.operations else None
    return RankFigures(
        now,
        (done.operations + done.messages) * 1e9 / took_ns,
        length and done.operations * 1e9 / took_ns / length,
        (done.nbytes + done.message_nbytes) * 1e9 / took_ns,
        max(part(done.busy_ns, then.busy, pending.busy), waiting),
        waiting,
        part(done.awaited_ns, then.awaited, pending.awaited),
    )


def _pending(group: Mapping[int, RankState]) -> dict[int, _Pending]:
    found = {rank: _Pending(busy=_running_ns(state)) for rank, state in group.items()}
    for wait in waits(group):
        if wait.kind == "message" or wait.since_ns < _LONG_NS:
            continue
        for rank in wait.ranks if wait.targets else ():
            found[rank] = found[rank]._replace(waiting=found[rank].busy)
        for rank in wait.targets:
            if rank in found:
                found[rank] = found[rank]._replace(awaited=wait.since_ns)
    return found


def _running_ns(state: RankState) -> int:
    return state.at_ns - state.current.started if state.current else 0
