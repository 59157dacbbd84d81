"""The memory of a DDP job: one job per backend, with the same model and steps in each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.ddp import DdpPlan, job_spec
from benchmarks.footprint import Footprint
from benchmarks.job import Job
from benchmarks.results import Progress

STEPS = 6  # buckets are rebuilt after the first step and registered after the second
MIB = 2**20


@dataclass(frozen=True)
class JobMemory:
    """The memory of a job's ranks after some training, and the growth of shared memory."""

    backend: str
    ranks: tuple[Footprint, ...]
    shmem_growth: int

    def mean(self, name: str) -> float:
        """Return the mean over the ranks of a field of Footprint, in bytes."""
        return fmean(getattr(rank, name) for rank in self.ranks)


@dataclass(frozen=True)
class MemoryReport:
    """One entry per backend; the first is the reference for the others."""

    settings: dict[str, Any]
    jobs: tuple[JobMemory, ...]

    def beyond_first(self, job: JobMemory, name: str) -> float:
        """Return how many bytes per rank the job uses beyond the first backend."""
        return job.mean(name) - self.jobs[0].mean(name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"schema": 1, "operation": "memory", **asdict(self)}


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> MemoryReport:
    """Train a few steps with every backend, one job after the other.

    Raises:
        JobError: A rank failed.
    """
    jobs = []
    for backend in plan.backends:
        progress(f"training over {backend}")
        before = system_shmem()
        with Job(job_spec(plan, [backend])) as job:
            job.call("train", {"variant": backend, "steps": STEPS})
            ranks = tuple(job.call("footprint"))
            jobs.append(JobMemory(backend, ranks, system_shmem() - before))
    return MemoryReport(asdict(plan), tuple(jobs))


def system_shmem(path: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes of shared memory on this machine, mapped or not."""
    for line in path.read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no Shmem line")


def memory_table(report: MemoryReport) -> Table:
    """Return a table with one row per backend, in MiB per rank."""
    table = Table(
        title=f"memory of a DDP job, MiB per rank, {report.settings['ranks']} ranks",
        caption="Pss counts a shared page once, Rss in each rank that maps it",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("backend")
    first = report.jobs[0].backend
    for name in ("Rss", "Pss", "shared\nPss", f"Pss beyond\n{first}", "machine's\nShmem growth"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in report.jobs:
        sizes = [job.mean(name) for name in ("rss", "pss", "pss_shmem")]
        sizes += [report.beyond_first(job, "pss"), job.shmem_growth]
        table.add_row(job.backend, *(f"{size / MIB:.1f}" for size in sizes))
    return table
