"""Chooses the job that a command is to show."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_plugins.flight.jobs import Job, find_jobs, match_jobs
from sdp_plugins.flight.segments import read_segments


class NoSuchJobError(Exception):
    """Raised when no job matches, or several do; the text lists them."""


def job_here(word: str = "") -> Job:
    """The job on this machine that a word names; see `match_jobs`.

    Raises:
        NoSuchJobError: No job matches, or several do.
    """
    found = read_segments()
    here = find_jobs(found.snapshots)
    if not here:
        raise NoSuchJobError(_nothing(found.others))
    return only_job(match_jobs(here, word) if word else here, "here", here)


def only_job(found: Sequence[Job], where: str, all_jobs: Sequence[Job] = ()) -> Job:
    """The only job of several.

    Raises:
        NoSuchJobError: There is none, or several.
    """
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"  {job.title}" for job in found or all_jobs)
    if not found:
        raise NoSuchJobError(f"no such job; there are\n{listed}")
    raise NoSuchJobError(f"there are {len(found)} jobs {where}; name one of\n{listed}")


def _nothing(others: int) -> str:
    if others:
        return "the jobs here use another version of sdp_plugins. Hint: run this with their Python."
    return (
        "no job of this user has an open group on this machine. Hint: run this on the machine, and "
        "in the container, of the ranks, as the user who started them."
    )
