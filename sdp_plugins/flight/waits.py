"""Which ranks of a group wait, for which others, in which operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sdp_plugins.flight.formatting import format_op
from sdp_plugins.flight.rank_state import RankState


class Wait(NamedTuple):
    """Ranks that wait.

    Attributes:
        ranks: The ranks.
        what: The operation in which they wait.
        since_ns: How long the first of them has waited.
        kind: ``absent``: for ranks that have not called the operation; ``behind``: for ranks that
            have, and do not go on; ``unseen``: for ranks that were not read; ``together``: for
            none, because all have called it; ``message``: for the peer of a message; ``disagree``:
            all have called something, but not the same.
        targets: The ranks for which they wait.
    """

    ranks: tuple[int, ...]
    what: str
    since_ns: int
    kind: str
    targets: tuple[int, ...]


def waits(group: Mapping[int, RankState]) -> list[Wait]:
    """All waits among the ranks of a group."""
    return [*_collectives(group), *_messages(group)]


def _collectives(group: Mapping[int, RankState]) -> Iterator[Wait]:
    numbers = {state.current.seq for state in group.values() if state.current}
    for seq in sorted(numbers, reverse=True):
        arrived = [s for s in group.values() if s.current and s.current.seq == seq]
        absent = tuple(state.rank for state in group.values() if state.begun < seq)
        by_call = _by_call(arrived)
        if len(by_call) > 1 and not absent:
            for what, states in by_call.items():
                yield _wait(states, what, "disagree", ())
            continue
        kind, targets = ("absent", absent) if absent else _stalled(arrived, group)
        for what, states in by_call.items():
            waiting = [state for state in states if state.rank not in targets]
            if waiting:
                yield _wait(waiting, what, kind, targets)


def _wait(states: Sequence[RankState], what: str, kind: str, targets: tuple[int, ...]) -> Wait:
    since_ns = max(state.at_ns - state.current.started for state in states if state.current)
    return Wait(tuple(state.rank for state in states), what, since_ns, kind, targets)


def _by_call(arrived: Sequence[RankState]) -> dict[str, list[RankState]]:
    """The ranks by what they have called."""
    found: dict[str, list[RankState]] = {}
    for state in arrived:
        if state.current:
            found.setdefault(format_op(state.current, state.snapshot.info), []).append(state)
    return found


def _stalled(
    arrived: Sequence[RankState], group: Mapping[int, RankState]
) -> tuple[str, tuple[int, ...]]:
    """Why ranks wait although all that were read have arrived: kind and targets of the wait."""
    behind = tuple(rank for node in _by_node(arrived) for rank in _behind(node))
    if behind:
        return "behind", behind
    world_size = arrived[0].snapshot.info.world_size
    unseen = tuple(rank for rank in range(world_size) if rank not in group)
    return ("unseen", unseen) if unseen else ("together", ())


def _by_node(arrived: Sequence[RankState]) -> list[list[RankState]]:
    found: dict[tuple[str, str], list[RankState]] = {}
    for state in arrived:
        found.setdefault((state.snapshot.info.clock, state.snapshot.info.host), []).append(state)
    return list(found.values())


def _behind(node: Sequence[RankState]) -> list[int]:
    """Ranks of a node that have gone fewer steps than others; one that has ended goes none.

    In a group on several nodes ranks may be behind because they wait for other nodes.
    """
    ended = [
        state.rank
        for state in node
        if state.snapshot.liveness == "ended" and state.snapshot.state == "open"
    ]
    stopped = [state.rank for state in node if state.snapshot.liveness == "stopped"]
    most = max(_distance(state, node[0]) for state in node)
    spans = node[0].snapshot.info.world_size > len(node)
    late = [s.rank for s in node if _distance(s, node[0]) < most and (s.in_step or not spans)]
    found = ended or late or stopped
    return found if len(found) < len(node) else []


def _distance(state: RankState, other: RankState) -> int:
    """By how many steps a rank is ahead of another; the counters wrap."""
    return (state.snapshot.step - other.snapshot.step + 2**31) % 2**32 - 2**31


def _messages(group: Mapping[int, RankState]) -> Iterator[Wait]:
    for state in group.values():
        for event in state.messages:
            what = format_op(event, state.snapshot.info)
            peers = (event.peer,) if event.peer >= 0 else ()
            yield Wait((state.rank,), what, state.at_ns - event.issued, "message", peers)
