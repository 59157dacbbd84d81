"""Alternates between libraries: A B C, A B C, ... so that transient load affects all alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks import machine
from benchmarks.job import Job, JobError, JobSpec, Start
from benchmarks.libraries import LibrarySpec
from benchmarks.mpi import MpiInstall
from benchmarks.results import Measurement, Progress, Report
from benchmarks.values import itemsize

TASK = "benchmarks.collective:CollectiveTask"
CALLS_PER_ROUND = (4, 2000)
BARRIER_CELL = ("float32", 4)  # the report's key of an operation without a buffer


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        operation: "all_reduce" or "barrier".
        nbytes: Sizes of one rank's buffer.
        dtypes: Element types.
        ranks: Number of processes in a job.
        threads: Threads per process.
        rounds: Number of turns of every library at every size.
        round_s: Approximate duration of a turn.
    """

    operation: str = "all_reduce"
    nbytes: tuple[int, ...] = (4096,)
    dtypes: tuple[str, ...] = ("float32",)
    ranks: int = 2
    threads: int = 1
    rounds: int = 7
    round_s: float = 0.2


class LibraryJobs:
    """One job per library. A failing library is left out, and the report contains the reason."""

    def __init__(
        self,
        plan: Plan,
        report: Report,
        mpis: Sequence[MpiInstall],
        start: Start | None = None,
    ) -> None:
        self._plan = plan
        self._start = start
        self._report = report
        self._mpis = mpis
        self._jobs: dict[str, Job] = {}
        self._stack = ExitStack()
        self.specs: dict[str, LibrarySpec] = {}

    def __enter__(self) -> LibraryJobs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def libraries(self) -> list[str]:
        """The libraries that still run."""
        return list(self._jobs)

    def start(self, library: LibrarySpec) -> None:
        """Start a library's job; its ranks join their group."""
        mpi = next((m for m in self._mpis if library.mpi in ("any", m.flavour)), None)
        if library.mpi and mpi is None:
            what = "MPI" if library.mpi == "any" else library.mpi
            self._report.skipped[library.name] = f"needs mpi4py and {what}: none found"
            return
        spec = JobSpec(
            name=library.name,
            task=TASK,
            arguments={
                "target": library.target,
                "options": dict(library.options),
                "rounding": library.rounding,
            },
            ranks=self._plan.ranks,
            threads=self._plan.threads,
            environment=library.environment,
            mpi=mpi if library.mpi else None,
            start=self._start,
        )
        try:
            self.specs[library.name] = library
            self._jobs[library.name] = self._stack.enter_context(Job(spec))
        except JobError as failure:
            self._report.skipped[library.name] = str(failure)
            return
        if versions := self.call(library.name, "version"):
            self._report.versions[library.name] = versions[0]

    def call(self, library: str, command: str, **arguments: object) -> list[Any] | None:
        """Call a command of a library; return None if the library has failed."""
        try:
            return self._jobs[library].call(command, arguments)
        except JobError as failure:
            self._report.skipped[library] = str(failure)
            self._jobs.pop(library).close()
            return None


def run(
    plan: Plan,
    libraries: Sequence[LibrarySpec],
    mpis: Sequence[MpiInstall] = (),
    progress: Progress = lambda text: None,
) -> Report:
    """Measure a plan."""
    report = Report(plan.operation, asdict(plan), machine.describe())
    with LibraryJobs(plan, report, mpis) as jobs:
        for library in libraries:
            progress(f"starting {library.name}")
            jobs.start(library)
        for dtype in plan.dtypes:
            for nbytes in plan.nbytes:
                measure(plan, report, jobs, dtype, nbytes, progress)
    return report


def measure(
    plan: Plan, report: Report, jobs: LibraryJobs, dtype: str, nbytes: int, progress: Progress
) -> None:
    """Measure all rounds of one dtype and size."""
    count = max(1, nbytes // itemsize(dtype))
    calls = _prepare(plan, jobs, dtype, count)
    rounds: dict[str, list[float]] = {library: [] for library in calls}
    for number in range(plan.rounds):
        progress(f"{dtype} {nbytes} bytes: round {number + 1} of {plan.rounds}")
        for library in [library for library in calls if library in jobs.libraries]:
            if samples := jobs.call(library, "burst", iterations=calls[library]):
                rounds[library].append(condense(samples))
    size = count * itemsize(dtype)
    for library in [library for library in calls if library in jobs.libraries]:
        path = (jobs.call(library, "path") or [""])[0]
        case = {"operation": plan.operation, "dtype": dtype, "nbytes": size, "ranks": plan.ranks}
        spec = jobs.specs[library]
        facts = {"path": path, "reference": spec.reference, "reduces": spec.reduces}
        found = Measurement(library, tuple(rounds[library]), case, facts)
        report.measurements.append(found)


def _prepare(plan: Plan, jobs: LibraryJobs, dtype: str, count: int) -> dict[str, int]:
    """Make all libraries allocate their buffers; return each one's number of calls per round."""
    calls = {}
    few, many = CALLS_PER_ROUND
    for library in jobs.libraries:
        answers = jobs.call(library, "prepare", operation=plan.operation, dtype=dtype, count=count)
        if answers and all("seconds" in answer for answer in answers):
            seconds = max(answer["seconds"] for answer in answers)
            calls[library] = min(many, max(few, int(plan.round_s / max(seconds, 1e-7))))
    return calls


def condense(samples: Sequence[Sequence[int]]) -> float:
    """Convert nanoseconds of ranks x calls to microseconds: mean over ranks, median over calls.

    nccl-tests also reports the mean over ranks. The median drops interrupted calls.
    """
    return median(fmean(call) for call in zip(*samples, strict=True)) / 1e3


def barrier_plan(plan: Plan) -> Plan:
    """Return a plan that times the barrier in the same job."""
    dtype, nbytes = BARRIER_CELL
    return replace(plan, operation="barrier", nbytes=(nbytes,), dtypes=(dtype,))
