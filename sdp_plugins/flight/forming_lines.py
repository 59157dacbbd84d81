"""Formats which ranks wait for which others to make a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.flight.describe_rank import Groups, describe_rank
from sdp_plugins.flight.formatting import format_duration
from sdp_plugins.flight.rank_state import RankState


def forming_lines(groups: Groups) -> list[str]:
    """All groups that are being made, as far as the makers' other groups show them."""
    arrived: dict[tuple[str, int], dict[tuple[str, str], RankState]] = {}
    for token in sorted(groups, key=lambda token: -len(groups[token])):
        for state in groups[token].values():
            if state.forming:
                key = state.forming.names.group, state.forming.names.world_size
                arrived.setdefault(key, {}).setdefault(state.process, state)
    return [line for states in arrived.values() for line in _lines([*states.values()], groups)]


def _lines(arrived: Sequence[RankState], groups: Groups) -> Iterator[str]:
    names = next(state.forming.names for state in arrived if state.forming)
    yield f"group {names.group}, which is being made ({names.members}):"
    longest = max(state.at_ns - state.forming.since_ns for state in arrived if state.forming)
    info = arrived[0].snapshot.info
    who = info.names.list(state.rank for state in arrived)
    have = "have" if len(arrived) > 1 else "has"
    missing = _missing(arrived, names, groups)
    if missing:
        whom = info.names.list(state.rank for state in missing)
    else:
        more = names.world_size - len(arrived)
        whom = f"{more} more" if more > 0 else "each other; all have arrived"
    yield f"  {who} {have} waited {format_duration(longest)} for {whom}"
    for state in missing:
        yield f"    {describe_rank(state, info.token, groups)}"


def _missing(arrived: Sequence[RankState], names: RankNames, groups: Groups) -> list[RankState]:
    """The members that have not arrived, as far as they are in the arrived ranks' other group.

    If the members are unknown, they are all ranks of that group, provided that their number fits.
    """
    info, members = arrived[0].snapshot.info, names.global_ranks
    if members is None and info.world_size == names.world_size:
        members = tuple(map(info.global_rank_of, range(info.world_size)))
    processes = {state.process for state in arrived}
    return [
        state
        for state in groups[info.token].values()
        if state.process not in processes and state.snapshot.info.global_rank in (members or ())
    ]
