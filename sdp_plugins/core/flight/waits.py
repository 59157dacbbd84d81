"""Who waits for whom in what, in one group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..trace.events import Event
from .moment import Moment
from .names import named


class Wait(NamedTuple):
    """Ranks that wait.

    Attributes:
        ranks: Who.
        what: In which operation.
        since_ns: For how long, the longest.
        kind: ``absent``: for ranks that have not come; ``behind``: for such that have come and do
            not go on; ``unseen``: for ranks of which nothing is known; ``together``: for nobody;
            ``message``: for a peer; ``disagree``: ranks that have come called something else.
        targets: For whom.
    """

    ranks: tuple[int, ...]
    what: str
    since_ns: int
    kind: str
    targets: tuple[int, ...]


def waits(group: Mapping[int, Moment]) -> list[Wait]:
    """All waits among the ranks of a group.

    Args:
        group: What is known of its ranks.
    """
    return [*_collectives(group), *_messages(group)]


def _collectives(group: Mapping[int, Moment]) -> Iterator[Wait]:
    numbers = {m.current.seq for m in group.values() if m.current}
    for seq in sorted(numbers, reverse=True):
        there = [m for m in group.values() if m.current and m.current.seq == seq]
        absent = tuple(m.rank for m in group.values() if m.begun < seq)
        parties = _parties(there)
        if len(parties) > 1 and not absent:
            for what, party in parties.items():
                yield _wait(party, what, "disagree", ())
            continue
        kind, targets = ("absent", absent) if absent else _stalled(there, group)
        for what, party in parties.items():
            waiting = [m for m in party if m.rank not in targets]
            if waiting:
                yield _wait(waiting, what, kind, targets)


def _wait(party: Sequence[Moment], what: str, kind: str, targets: tuple[int, ...]) -> Wait:
    since = max(m.at_ns - m.current.started for m in party if m.current)
    return Wait(tuple(m.rank for m in party), what, since, kind, targets)


def _parties(there: Sequence[Moment]) -> dict[str, list[Moment]]:
    """By what they have called."""
    found: dict[str, list[Moment]] = {}
    for m in there:
        if m.current:
            found.setdefault(named(m.current, m.sheet.about), []).append(m)
    return found


def _stalled(there: Sequence[Moment], group: Mapping[int, Moment]) -> tuple[str, tuple[int, ...]]:
    """Why ranks wait although all that are seen have come."""
    behind = tuple(rank for node in _by_node(there) for rank in _behind(node))
    if behind:
        return "behind", behind
    world_size = there[0].sheet.about.world_size
    unseen = tuple(rank for rank in range(world_size) if rank not in group)
    return ("unseen", unseen) if unseen else ("together", ())


def _by_node(there: Sequence[Moment]) -> list[list[Moment]]:
    found: dict[tuple[str, str], list[Moment]] = {}
    for m in there:
        found.setdefault((m.sheet.about.clock, m.sheet.about.host), []).append(m)
    return list(found.values())


def _behind(node: Sequence[Moment]) -> list[int]:
    """Ranks of a node that have gone fewer steps than others; one that has ended goes none.

    In a group on several nodes they may not have, because they wait for other nodes.
    """
    ended = [m.rank for m in node if m.sheet.life == "ended" and m.sheet.state == "open"]
    stopped = [m.rank for m in node if m.sheet.life == "stopped"]
    most = max(_distance(m, node[0]) for m in node)
    spans = node[0].sheet.about.world_size > len(node)
    late = [m.rank for m in node if _distance(m, node[0]) < most and (m.in_step or not spans)]
    found = ended or late or stopped
    return found if len(found) < len(node) else []


def _distance(m: Moment, other: Moment) -> int:
    """By how many steps; the counters wrap."""
    return (m.sheet.step - other.sheet.step + 2**31) % 2**32 - 2**31


def _messages(group: Mapping[int, Moment]) -> Iterator[Wait]:
    for m in group.values():
        for event in m.messages:
            since = m.at_ns - event.issued
            yield Wait((m.rank,), named(event, m.sheet.about), since, "message", _peers(event))


def _peers(event: Event) -> tuple[int, ...]:
    return (event.peer,) if event.peer >= 0 else ()
