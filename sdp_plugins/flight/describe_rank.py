"""Describes what one rank is doing."""

from __future__ import annotations

from collections.abc import Mapping

from sdp_plugins.flight.formatting import format_duration, format_op
from sdp_plugins.flight.rank_state import RankState, rank_state

Groups = Mapping[int, Mapping[int, RankState]]
"""The ranks of each group, by the group's token and their rank in it."""


def describe_rank(state: RankState, token: int, groups: Groups) -> str:
    """What a rank is doing while others wait for it in the group with this token."""
    info = state.snapshot.info
    head = f"rank {info.global_rank} (pid {info.pid} on {info.host})"
    text = " ".join(filter(None, (head, _condition(state))))
    doing = [_operation(state) or _in_another_group(state, token, groups), _forming(state)]
    if any(doing):
        return f"{text} {' and '.join(filter(None, doing))}"
    idle = "was in no operation" if state.snapshot.liveness == "ended" else "is in no operation"
    return f"{text} {idle}; {last_operation(state)}"


def _condition(state: RankState) -> str:
    """Whether it has closed the group, ended or stopped; empty if it is running."""
    if state.snapshot.state == "left":
        return "has closed the group and"
    if state.snapshot.liveness == "ended":
        return "has ended; it"
    if state.snapshot.liveness == "stopped":
        return "is stopped (by a signal or a debugger) and"
    return ""


def _operation(state: RankState) -> str:
    info, parts = state.snapshot.info, []
    if state.current:
        time = format_duration(state.at_ns - state.current.started)
        parts.append(f"has been in {format_op(state.current, info)} for {time}")
    elif state.messages:
        oldest = min(state.messages, key=lambda event: event.issued)
        time = format_duration(state.at_ns - oldest.issued)
        parts.append(f"has waited {time} in {format_op(oldest, info)}")
    if parts and state.queued:
        parts.append(f"with {len(state.queued)} more queued behind it")
    return ", ".join(parts)


def _forming(state: RankState) -> str:
    if state.forming is None:
        return ""
    time = format_duration(state.at_ns - state.forming.since_ns)
    return f"has waited {time} for the others to make group {state.forming.names.group}"


def _in_another_group(state: RankState, token: int, groups: Groups) -> str:
    """What the same process is doing in another group, or was doing when that failed."""
    others = [
        its
        for other, group in groups.items()
        for its in group.values()
        if other != token and its.process == state.process
    ]
    for its in others:
        now = rank_state(its.snapshot, state.at_ns)
        if its.snapshot.state == "open" and (doing := _operation(now)):
            return f"{doing} in group {its.snapshot.info.name}; {last_operation(state)}"
    for its in sorted(others, key=lambda its: -its.at_ns):
        if failed := _failed_operation(its, state):
            return f"{failed}; {last_operation(state)}"
    return ""


def _failed_operation(its: RankState, state: RankState) -> str:
    """What the process was doing in a group that failed, unless it has gone on since."""
    event = its.current
    if its.snapshot.state != "failed" or not (event and event.finished):
        return ""
    gone_on = state.last is not None and state.last.finished >= its.at_ns
    if gone_on or event.started > state.at_ns:
        return ""
    info = its.snapshot.info
    what = f"{format_op(event, info)} for {format_duration(its.at_ns - event.started)}"
    apart = format_duration(abs(its.at_ns - state.at_ns))
    when = f"{apart} {'before' if its.at_ns <= state.at_ns else 'later'}"
    return f"was in {what} in group {info.name}, which failed {when}"


def last_operation(state: RankState) -> str:
    """The operation that the rank completed last in the group."""
    if state.last is None:
        return "it has done nothing in this group yet"
    time = format_duration(state.at_ns - state.last.finished)
    return f"its last: {format_op(state.last, state.snapshot.info)}, done {time} ago"
