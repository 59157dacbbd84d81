"""Which ranks are of one job, and which jobs a word on the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdp_plugins.core.process_identity import parents, process_command
from sdp_plugins.core.rank_info import RankInfo
from sdp_plugins.core.rank_names import name_ranks, printable
from sdp_plugins.flight.rank_snapshot import RankSnapshot, liveness

_MOST_CHARS = 60
_MOST_KEYS = 2


class Job(NamedTuple):
    """The ranks of a job.

    Attributes:
        keys: The job's key; none if the launcher sets none, several if processes have gone from
            job to job.
        snapshots: What its ranks show of all groups.
    """

    keys: list[str]
    snapshots: list[RankSnapshot]

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return sorted({snapshot.info.pid for snapshot in self.snapshots})

    @property
    def launchers(self) -> set[int]:
        """The processes above its ranks on this machine."""
        return {above for info in self._here for above in parents(info.pid)}

    @property
    def title(self) -> str:
        """One line for a list of jobs."""
        hosts = ", ".join(sorted({snapshot.info.host for snapshot in self.snapshots}))
        groups = len({snapshot.info.token for snapshot in self.snapshots})
        found = name_ranks({snapshot.info.global_rank for snapshot in self.snapshots})
        count = f"{groups} group{'s' if groups > 1 else ''}"
        more = f" and {len(self.keys) - _MOST_KEYS} more" if len(self.keys) > _MOST_KEYS else ""
        key = " ".join(self.keys[:_MOST_KEYS]) + more or "(unnamed)"
        of = f" of `{self._command}`" if self._command else ""
        return f"job {key} on {hosts}: {found}{of}, {count}, {_pids(self.pids)}"

    @property
    def _command(self) -> str:
        """The command of the first rank on this machine."""
        first = min(self._here, key=lambda info: info.global_rank, default=None)
        return printable(process_command(first.process), _MOST_CHARS) if first else ""

    @property
    def _here(self) -> list[RankInfo]:
        """The ranks on this machine that have not ended: another process may get an old pid."""
        infos = [snapshot.info for snapshot in self.snapshots]
        return [info for info in infos if liveness(info) in ("running", "stopped")]


def find_jobs(snapshots: Sequence[RankSnapshot]) -> list[Job]:
    """Group snapshots into jobs: those that share a job's key, a process or a group."""
    found: list[tuple[set[object], list[RankSnapshot]]] = []
    for snapshot in snapshots:
        marks: set[object] = {snapshot.info.token, (snapshot.info.host, snapshot.info.process)}
        if snapshot.info.job:
            marks.add(snapshot.info.job)
        mine = [snapshot]
        for other in [job for job in found if job[0] & marks]:
            found.remove(other)
            marks, mine = marks | other[0], other[1] + mine
        found.append((marks, mine))
    return [Job(sorted({s.info.job for s in those} - {""}), those) for _, those in found]


def match_jobs(found: Sequence[Job], word: str) -> list[Job]:
    """The jobs that a word names: by a key or a part of it, or the pid of a rank or its launcher.

    An empty word names any job.
    """
    exact = [  # a key's prefix names its source
        job for job in found if any(word in (key, key.partition(":")[2]) for key in job.keys)
    ]
    if exact or not word:
        return exact or list(found)
    if word.isdigit() and (by_process := jobs_of_process(found, int(word))):
        return by_process
    return [job for job in found if any(word in key for key in job.keys)]


def jobs_of_process(found: Sequence[Job], pid: int) -> list[Job]:
    """The jobs of which a process is a rank, or the launcher of a rank."""
    return [job for job in found if pid in job.pids or pid in job.launchers]


def _pids(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:8]))
    return f"pid{'s' if len(pids) > 1 else ''} {shown}{', ...' if len(pids) > 8 else ''}"
