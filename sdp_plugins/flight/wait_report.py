"""Formats which ranks wait for which others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from sdp_plugins.flight.describe_rank import Groups, describe_rank, last_operation
from sdp_plugins.flight.formatting import format_duration
from sdp_plugins.flight.forming_lines import forming_lines
from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.flight.rank_state import RankState, rank_states
from sdp_plugins.flight.waits import Wait, waits

_MOST_LINES = 12
_MOST_REACHED = 3

_WAITS = {
    "absent": "have waited {time} in {what} for {targets}",
    "behind": "have been in {what} for {time}, and wait for {targets} (there, but behind)",
    "unseen": "have been in {what} for {time}, and wait for {targets} (not seen here)",
    "together": "have been in {what} for {time}; all ranks have arrived",
    "disagree": "called {what} {time} ago, and other ranks made a different call",
    "message": "have waited {time} in {what}",
}


def groups_of(snapshots: Sequence[RankSnapshot]) -> dict[int, dict[int, RankState]]:
    """The ranks of each group, by the group's token and their rank in it."""
    found: dict[int, list[RankSnapshot]] = {}
    for snapshot in snapshots:
        found.setdefault(snapshot.info.token, []).append(snapshot)
    return {token: rank_states(those) for token, those in found.items()}


def report(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """All groups but closed ones; working groups and large groups first.

    Groups that are being made precede them, because ranks that wait there block everything else.
    """
    groups = groups_of(snapshots)
    lines = forming_lines(groups)
    for token in sorted(groups, key=lambda token: _order(groups[token])):
        if any(state.snapshot.state != "left" for state in groups[token].values()):
            lines += group_lines(token, groups)
    return lines


def error_lines(token: int, groups: Groups) -> list[str]:
    """The group of an error, and the groups in which the ranks wait for which it waits."""
    lines = group_lines(token, groups, failures=False)
    for other in islice(_reached(token, groups), _MOST_REACHED):
        lines += group_lines(other, groups, failures=False)
    return lines


def _reached(token: int, groups: Groups) -> Iterator[int]:
    """The groups in which awaited ranks themselves wait, followed from group to group."""
    found = [token]
    for one in found:
        targets = {rank for wait in waits(groups[one]) for rank in wait.targets}
        awaited = {groups[one][rank].process for rank in targets if rank in groups[one]}
        for other, group in groups.items():
            blocked = (state for state in group.values() if state.process in awaited)
            if other not in found and any(state.waits for state in blocked):
                found.append(other)
                yield other


def _order(group: Mapping[int, RankState]) -> tuple[bool, int]:
    failed = any(state.snapshot.state == "failed" for state in group.values())
    return failed, -len(group)


def group_lines(token: int, groups: Groups, *, failures: bool = True) -> list[str]:
    """The group with this token; with `failures`, also why it has failed."""
    group = groups[token]
    found = waits(group)
    lines = [_title(group), *(_failures(group) if failures else ())]
    for wait in found[:_MOST_LINES]:
        lines += [f"  {_wait(wait, group)}"]
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    if not found:
        lines.append(f"  {_idle(group)}")
    whom = dict.fromkeys(rank for wait in found for rank in wait.targets)
    whom |= dict.fromkeys(rank for rank, state in group.items() if state.gone)
    lines += [f"    {describe_rank(group[rank], token, groups)}" for rank in whom if rank in group]
    return lines


def _title(group: Mapping[int, RankState]) -> str:
    info = next(iter(group.values())).snapshot.info
    seen = "" if len(group) == info.world_size else f", {len(group)} of them seen here"
    return f"group {info.name} ({info.names.members}{seen}):"


def _failures(group: Mapping[int, RankState]) -> Iterator[str]:
    causes: dict[str, list[int]] = {}
    for state in group.values():
        if state.snapshot.state == "failed" and " gave up: " not in state.snapshot.cause:
            causes.setdefault(state.snapshot.cause, []).append(state.rank)
    for cause, those in causes.items():
        info = group[those[0]].snapshot.info
        yield f"  failed on {info.names.list(those)}: {cause}"


def _wait(wait: Wait, group: Mapping[int, RankState]) -> str:
    info = group[wait.ranks[0]].snapshot.info
    text = _WAITS[wait.kind].format(
        time=format_duration(wait.since_ns),
        what=wait.what,
        targets=info.names.list(wait.targets),
    )
    if len(wait.ranks) == 1:
        text = text.replace("have ", "has ", 1)
        text = text.replace("and wait for", "and waits for", 1)
    return f"{info.names.list(wait.ranks)} {text}"


def _idle(group: Mapping[int, RankState]) -> str:
    done = [state for state in group.values() if state.last]
    if not done:
        return "nobody waits, and nothing was done yet"
    latest = max(done, key=lambda state: state.last.finished if state.last else 0)
    return f"nobody waits; {last_operation(latest)}"
