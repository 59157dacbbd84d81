"""Who waits for whom in the making of groups, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .description import Groups, describe
from .meeting import Meeting
from .moment import Moment
from .names import ranks, seconds


def meeting_lines(groups: Groups) -> list[str]:
    """All groups that are being made by ranks that have other groups, where that is to be seen."""
    there: dict[tuple[str, int], dict[tuple[str, str], Moment]] = {}
    for token in sorted(groups, key=lambda token: -len(groups[token])):
        for m in groups[token].values():
            if m.meeting:
                key = m.meeting.name, m.meeting.world_size
                there.setdefault(key, {}).setdefault(m.process, m)
    return [line for found in there.values() for line in _lines(list(found.values()), groups)]


def _lines(there: Sequence[Moment], groups: Groups) -> Iterator[str]:
    meetings = [m.meeting for m in there if m.meeting]
    names, size = meetings[0].names, meetings[0].world_size
    yield f"group {names.group}, which is being made ({names.members}):"
    since = max(m.at_ns - m.meeting.since_ns for m in there if m.meeting)
    about = there[0].sheet.about
    who = ranks(tuple(m.rank for m in there), about)
    have = "have" if len(there) > 1 else "has"
    token, absent, gave_up = _others(there, meetings[0], groups)
    if absent:
        whom = ranks(tuple(m.rank for m in absent), about)
    elif gave_up:
        whom = f"{ranks(tuple(m.rank for m in gave_up), about)}, who gave up"
    else:
        more = size - len(there)
        whom = f"{more} more" if more > 0 else "each other; all have come"
    yield f"  {who} {have} waited {seconds(since)} for {whom}"
    for m in absent:
        yield f"    {describe(m, token, groups)}"


def _others(
    there: Sequence[Moment], meeting: Meeting, groups: Groups
) -> tuple[int, Sequence[Moment], Sequence[Moment]]:
    """Who has not come, and who has and gave up.

    That is seen where the new group's members are known, or where it has as many ranks as the one
    that these were found in, whose token comes first.
    """
    about = there[0].sheet.about
    members = meeting.members
    if members is None and about.world_size == meeting.world_size:
        members = tuple(map(about.shown, range(about.world_size)))
    come = {m.process for m in there}
    others = [
        m
        for m in groups[about.token].values()
        if m.process not in come and m.sheet.about.job_rank in (members or ())
    ]
    gave_up = [m for m in others if m.vain_meeting and m.vain_meeting.name == meeting.name]
    # Of several that a process makes at once one is seen: it may have come to the others.
    absent = [m for m in others if m not in gave_up and not (m.meeting and m.meeting.others)]
    return about.token, absent, gave_up
