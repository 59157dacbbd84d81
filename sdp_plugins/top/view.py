"""Words and numbers for what a job does, the same in a terminal and in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdp_plugins.flight.formatting import format_duration, format_op
from sdp_plugins.flight.jobs import Job
from sdp_plugins.flight.rank_state import RankState
from sdp_plugins.top.figures import GroupFigures, RankFigures

HEADINGS = (
    *("rank", "pid", "host", "steps/s", "ops/s", "bytes/s"),
    *("in ops", "waiting", "waited for", "now"),
)
_PREFIXES = ("", "k", "M", "G", "T")


class RankRow(NamedTuple):
    """One rank.

    Attributes:
        rank: Its number in the job.
        cells: A text for each of `HEADINGS`.
        straggler: Whether the others wait for it.
        gone: Whether its process has ended or is stopped.
    """

    rank: int
    cells: tuple[str, ...]
    straggler: bool
    gone: bool


class GroupView(NamedTuple):
    """One group: its title, which names the straggler, and its ranks."""

    title: str
    rows: list[RankRow]


class JobView(NamedTuple):
    """A job: its title, the groups that do something, and a line about the others."""

    title: str
    groups: list[GroupView]
    idle: str


def view_of(job: Job, figures: Sequence[GroupFigures]) -> JobView:
    """Describe a job; if all groups are idle, all of them."""
    shown = [group for group in figures if not group.idle] or list(figures)
    others = sorted(_name(group) for group in figures if group not in shown)
    idle = f"also open, and idle: {', '.join(others)}" if others else ""
    return JobView(job.title, [_group_view(group) for group in shown], idle)


def _name(group: GroupFigures) -> str:
    info = next(iter(group.ranks.values())).state.snapshot.info
    return f"{info.name} ({info.names.members})"


def _group_view(group: GroupFigures) -> GroupView:
    rows = [
        RankRow(
            figures.state.snapshot.info.global_rank,
            _cells(figures),
            rank == group.straggler,
            figures.state.gone,
        )
        for rank, figures in group.ranks.items()
    ]
    return GroupView(f"group {_name(group)}: {_straggler(group)}", rows)


def _straggler(group: GroupFigures) -> str:
    if group.straggler is None:
        return "no rank waits noticeably for another"
    figures = group.ranks[group.straggler]
    name = f"rank {figures.state.snapshot.info.global_rank}"
    return f"{name} is the straggler: others waited for it {_percent(figures.awaited)} of the time"


def _cells(figures: RankFigures) -> tuple[str, ...]:
    info = figures.state.snapshot.info
    return (
        str(info.global_rank),
        str(info.pid),
        info.host,
        "-" if figures.steps is None else _rate(figures.steps),
        _rate(figures.operations),
        _rate(figures.nbytes, "B"),
        _percent(figures.busy),
        _percent(figures.waiting),
        _percent(figures.awaited),
        doing(figures.state),
    )


def doing(state: RankState) -> str:
    """What a rank does now, and for how long."""
    conditions = {"ended": "has ended", "stopped": "is stopped"}
    condition = conditions.get(state.snapshot.liveness, "")
    return ", ".join(filter(None, (condition, _operation(state) or _last(state))))


def _operation(state: RankState) -> str:
    running = state.current or min(state.messages, key=lambda event: event.issued, default=None)
    if running is None:
        return ""
    since = running.started if running is state.current else running.issued
    what = format_op(running, state.snapshot.info)
    return f"in {what} for {format_duration(state.at_ns - since)}"


def _last(state: RankState) -> str:
    if state.last is None:
        return "in no operation yet"
    ago = format_duration(state.at_ns - state.last.finished)
    return f"{ago} after {format_op(state.last, state.snapshot.info)}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _rate(value: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: 12.3, 1.23 k, 456 MB."""
    index = 0
    while value >= 999.5 and index < len(_PREFIXES) - 1:
        value, index = value / 1000, index + 1
    digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_PREFIXES[index]}{unit}".rstrip()
