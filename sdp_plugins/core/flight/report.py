"""Who waits for whom, in words, for all groups that are seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from .description import Groups, describe, last_done
from .meeting_lines import meeting_lines
from .moment import Moment, moments
from .names import ranks, seconds
from .sheet import Sheet
from .waits import Wait, waits

_MOST_LINES = 12

_WAITS = {
    "absent": "have waited {time} in {what} for {targets}",
    "behind": "have been in {what} for {time}, and wait for {targets} (there, but behind)",
    "unseen": "have been in {what} for {time}, and wait for {targets} (not seen here)",
    "together": "have been in {what} for {time}; all ranks have come",
    "disagree": "called {what}, {time} ago, and others something else",
    "message": "have waited {time} in {what}",
}


def groups_of(sheets: Sequence[Sheet]) -> dict[int, dict[int, Moment]]:
    """The ranks of each group, by the group's token and their number."""
    found: dict[int, list[Sheet]] = {}
    for sheet in sheets:
        found.setdefault(sheet.about.token, []).append(sheet)
    return {token: moments(those) for token, those in found.items()}


def report(sheets: Sequence[Sheet]) -> list[str]:
    """All groups but those that were closed in good order; working ones and large ones first.

    Those that are being made come before them: what hangs there hangs everything.
    """
    groups = groups_of(sheets)
    lines = meeting_lines(groups)
    for token in sorted(groups, key=lambda token: _order(groups[token])):
        if any(m.sheet.state != "left" for m in groups[token].values()):
            lines += group_lines(token, groups)
    return lines


def error_lines(token: int, groups: Groups) -> list[str]:
    """The group of an error, and those in which the ranks wait that it waits for."""
    lines = group_lines(token, groups, failures=False)
    for other in islice(_reached(token, groups), _MOST_REACHED):
        lines += group_lines(other, groups, failures=False)
    return lines


def _reached(token: int, groups: Groups) -> Iterator[int]:
    """The groups in which a rank waits that is waited for in one before."""
    found = [token]
    for one in found:
        targets = {rank for wait in waits(groups[one]) for rank in wait.targets}
        awaited = {groups[one][rank].process for rank in targets if rank in groups[one]}
        for other, group in groups.items():
            if other not in found and any(m.process in awaited and m.waits for m in group.values()):
                found.append(other)
                yield other


def _order(group: Mapping[int, Moment]) -> tuple[bool, int]:
    failed = any(m.sheet.state == "failed" for m in group.values())
    return failed, -len(group)


_MOST_REACHED = 3


def group_lines(token: int, groups: Groups, *, failures: bool = True) -> list[str]:
    """One group; with why it has failed, unless the reader knows."""
    group = groups[token]
    found = waits(group)
    lines = [_title(group), *(_failures(group) if failures else ())]
    for wait in found[:_MOST_LINES]:
        lines += [f"  {_say(wait, group)}"]
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    if not found:
        lines.append(f"  {_idle(group)}")
    whom = dict.fromkeys(rank for wait in found for rank in wait.targets)
    whom |= dict.fromkeys(rank for rank, m in group.items() if m.gone)
    lines += [f"    {describe(group[rank], token, groups)}" for rank in whom if rank in group]
    return lines


def _title(group: Mapping[int, Moment]) -> str:
    about = next(iter(group.values())).sheet.about
    seen = "" if len(group) == about.world_size else f", {len(group)} of them seen here"
    return f"group {about.name} ({about.names.members}{seen}):"


def _failures(group: Mapping[int, Moment]) -> Iterator[str]:
    causes: dict[str, list[int]] = {}
    for m in group.values():
        if m.sheet.state == "failed" and " gave up: " not in m.sheet.cause:
            causes.setdefault(m.sheet.cause, []).append(m.rank)
    for cause, those in causes.items():
        about = group[those[0]].sheet.about
        yield f"  failed on {ranks(tuple(those), about)}: {cause}"


def _say(wait: Wait, group: Mapping[int, Moment]) -> str:
    about = group[wait.ranks[0]].sheet.about
    text = _WAITS[wait.kind].format(
        time=seconds(wait.since_ns), what=wait.what, targets=ranks(wait.targets, about)
    )
    if len(wait.ranks) == 1:
        text = text.replace("have ", "has ", 1)
        text = text.replace("and wait for", "and waits for", 1)
    return f"{ranks(wait.ranks, about)} {text}"


def _idle(group: Mapping[int, Moment]) -> str:
    done = [m for m in group.values() if m.last]
    if not done:
        return "nobody waits, and nothing was done yet"
    last = max(done, key=lambda m: m.last.finished if m.last else 0)
    return f"nobody waits; {last_done(last)}"
