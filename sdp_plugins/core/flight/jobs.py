"""Which sheets are of one job, and which job is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import name_ranks
from ..process_identity import parents, process_command
from .life import life
from .sheet import Sheet
from .untrusted import printable

_MOST_CHARS = 60


class Job(NamedTuple):
    """The ranks of a job.

    Attributes:
        keys: What tells it from others: one, or none if no launcher says; more where processes
            have gone from job to job.
        sheets: What its ranks show, of all groups.
    """

    keys: list[str]
    sheets: list[Sheet]

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return sorted({sheet.about.pid for sheet in self.sheets})

    @property
    def title(self) -> str:
        """For a list of jobs."""
        hosts = ", ".join(sorted({sheet.about.host for sheet in self.sheets}))
        groups = len({sheet.about.token for sheet in self.sheets})
        found = name_ranks({sheet.about.job_rank for sheet in self.sheets})
        count = f"{groups} group{'s' if groups > 1 else ''}"
        key = " ".join(self.keys) or "(unnamed)"
        of = f" of `{self._command}`" if self._command else ""
        return f"job {key} on {hosts}: {found}{of}, {count}, {_pids(self.pids)}"

    @property
    def _command(self) -> str:
        """What its first rank on this machine runs."""
        here = [sheet.about for sheet in self.sheets if life(sheet.about) in ("running", "stopped")]
        first = min(here, key=lambda about: about.job_rank, default=None)
        return printable(process_command(first.process), _MOST_CHARS) if first else ""


def jobs(sheets: Sequence[Sheet]) -> list[Job]:
    """Sheets that share a job's key, a process or a group are of one job."""
    found: list[tuple[set[object], list[Sheet]]] = []
    for sheet in sheets:
        marks: set[object] = {sheet.about.token, (sheet.about.host, sheet.about.process)}
        if sheet.about.job:
            marks.add(sheet.about.job)
        mine = [sheet]
        for other in [job for job in found if job[0] & marks]:
            found.remove(other)
            marks, mine = marks | other[0], other[1] + mine
        found.append((marks, mine))
    return [Job(sorted({s.about.job for s in those} - {""}), those) for _, those in found]


def meant(found: Sequence[Job], word: str) -> list[Job]:
    """The jobs that a word may stand for: a key or a part of it, a process, one that started it.

    Args:
        found: All jobs.
        word: What was typed; empty: any.
    """
    exact = [job for job in found if {word} & {*job.keys, *_bare(job.keys)}]
    if exact or not word:
        return exact or list(found)
    if word.isdigit():
        started = [job for job in found if any(int(word) in _line(pid) for pid in job.pids)]
        if started:
            return started
    return [job for job in found if any(word in key for key in job.keys)]


def _bare(keys: Sequence[str]) -> list[str]:
    """Without what says where a key comes from."""
    return [key.partition(":")[2] for key in keys]


def _line(pid: int) -> list[int]:
    return [pid, *parents(pid)]


def _pids(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:8]))
    return f"pid{'s' if len(pids) > 1 else ''} {shown}{', ...' if len(pids) > 8 else ''}"
