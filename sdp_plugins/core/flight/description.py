"""What one rank is at, in words."""

from __future__ import annotations

from collections.abc import Mapping

from .meeting import Meeting
from .moment import Moment, moment
from .names import named, seconds

Groups = Mapping[int, Mapping[int, Moment]]
"""The ranks of each group, by the group's token and their number."""


def describe(m: Moment, token: int, groups: Groups) -> str:
    """What a rank is at that others wait for.

    Args:
        m: The rank in the group in which they wait.
        token: That group's.
        groups: All that are seen.
    """
    about = m.sheet.about
    head = f"rank {about.job_rank} (pid {about.pid} on {about.host})"
    text = " ".join(filter(None, (head, _standing(m))))
    doing = [_doing(m) or _elsewhere(m, token, groups), _meeting(m)]
    if any(doing):
        return f"{text} {' and '.join(filter(None, doing))}"
    if m.vain_meeting:
        return f"{text} {_in_vain(m, m.vain_meeting)}; {last_done(m)}"
    idle = "was in no operation" if m.sheet.life == "ended" else "is in no operation"
    return f"{text} {idle}; {last_done(m)}"


def _standing(m: Moment) -> str:
    """What became of it, if it is not just running."""
    if m.sheet.state == "left":
        return "has closed the group and"
    if m.sheet.life == "ended":
        return "has ended; it"
    if m.sheet.life == "stopped":
        return "is stopped (by a signal or a debugger) and"
    return ""


def _doing(m: Moment) -> str:
    about, parts = m.sheet.about, []
    if m.current:
        time = seconds(m.at_ns - m.current.started)
        parts.append(f"has been in {named(m.current, about)} for {time}")
    elif m.messages:
        oldest = min(m.messages, key=lambda event: event.issued)
        time = seconds(m.at_ns - oldest.issued)
        parts.append(f"has waited {time} in {named(oldest, about)}")
    if parts and m.queued:
        parts.append(f"with {len(m.queued)} more queued behind it")
    return ", ".join(parts)


def _meeting(m: Moment) -> str:
    if m.meeting:
        time = seconds(m.at_ns - m.meeting.since_ns)
        return f"has waited {time} for the others to make group {m.meeting.name}"
    return ""


def _in_vain(m: Moment, meeting: Meeting) -> str:
    time = seconds(meeting.until_ns - meeting.since_ns)
    ago = seconds(m.at_ns - meeting.until_ns)
    return f"had waited {time} in vain for the others to make group {meeting.name}, {ago} ago"


def _elsewhere(m: Moment, token: int, groups: Groups) -> str:
    """What the same process is at in another group, or was when that failed."""
    others = [
        its
        for other, group in groups.items()
        for its in group.values()
        if other != token and its.process == m.process
    ]
    for its in others:
        doing = _doing(moment(its.sheet, m.at_ns)) if its.sheet.state == "open" else ""
        if doing:
            return f"{doing} in group {its.sheet.about.name}; {last_done(m)}"
    for its in sorted(others, key=lambda its: -its.at_ns):
        ended = its.sheet.state == "failed" and its.current and its.current.finished
        since = m.last is None or m.last.finished < its.at_ns  # else the rank has gone on
        if ended and since and its.current and its.current.started <= m.at_ns:
            time = seconds(its.at_ns - its.current.started)
            what = f"{named(its.current, its.sheet.about)} for {time}"
            apart = seconds(abs(its.at_ns - m.at_ns))
            when = f"{apart} {'before' if its.at_ns <= m.at_ns else 'later'}"
            name = its.sheet.about.name
            return f"was in {what} in group {name}, which failed {when}; {last_done(m)}"
    return ""


def last_done(m: Moment) -> str:
    """What it did last in the group."""
    if m.last is None:
        return "it has done nothing in this group yet"
    time = seconds(m.at_ns - m.last.finished)
    return f"its last: {named(m.last, m.sheet.about)}, done {time} ago"
