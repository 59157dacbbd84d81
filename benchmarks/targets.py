"""The performance targets of smddp, each measured together with other libraries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import ddp, memory, runner
from benchmarks.job import JobError
from benchmarks.libraries import select
from benchmarks.mpi import MpiInstall
from benchmarks.results import Measurement, Progress, Report
from benchmarks.runner import Plan
from benchmarks.units import format_time

MIB = 2**20
BUCKET = 25 * MIB
DEFAULT_MPI = ("mpich", "openmpi")
ANY_MPI = (*DEFAULT_MPI, "openmpi-tuned")


@dataclass(frozen=True)
class Target:
    """One row of the table.

    Attributes:
        what: The measured quantity.
        required: The required value.
        measured: The measured value.
        others: The values of other libraries in the same run.
        reached: Whether the target is reached; None if its library was missing.
    """

    what: str
    required: str
    measured: str
    others: str = ""
    reached: bool | None = None


class Findings:
    """Reads the results of one size from a report."""

    def __init__(self, report: Report, dtype: str, nbytes: int) -> None:
        self._of = {
            m.variant: m
            for m in report.measurements
            if (m.case["dtype"], m.case["nbytes"]) == (dtype, nbytes)
        }

    def us(self, library: str) -> float | None:
        """Return a library's time per call."""
        return self._of[library].us if library in self._of else None

    def best(self, libraries: Iterable[str]) -> Measurement | None:
        """Return the fastest measured library among these."""
        there = [self._of[library] for library in libraries if library in self._of]
        return min(there, key=lambda m: m.us, default=None)

    def others(self, but: str) -> str:
        """Return the times of all other libraries."""
        return ", ".join(
            f"{library} {format_time(m.us)}" for library, m in self._of.items() if library != but
        )

    def at_most(self, what: str, library: str, limit_us: float) -> Target:
        """Return the target that a library takes at most `limit_us`."""
        us = self.us(library)
        verdict = None if us is None else us <= limit_us
        limit, measured = format_time(limit_us), _time(us)
        if verdict is False and measured == limit:
            measured = f"over {measured}"  # a missed target does not look reached
        return Target(what, f"at most {limit}", measured, self.others(library), verdict)

    def faster(
        self, what: str, library: str, than: Sequence[str], times: float, name: str
    ) -> Target:
        """Return the target that a library is at least `times` as fast as the fastest of `than`."""
        required = f"{times:g} x {name}" if times != 1 else f"no slower than {name}"
        other, us = self.best(than), self.us(library)
        if other is None or us is None:
            return Target(what, required, _time(us), self.others(library))
        ratio = other.us / us
        measured = f"{_time(us)}: {_down(ratio):.2f} x {other.variant}"
        return Target(what, required, measured, self.others(library), ratio >= times)


def collect(
    mpis: Sequence[MpiInstall],
    effort: Plan,
    steps: ddp.DdpPlan,
    progress: Progress = lambda text: None,
) -> list[Target]:
    """Measure all targets.

    Args:
        mpis: The MPI installations.
        effort: Rounds and their duration; this module sets the rest of the plan.
        steps: The training for the last targets.
        progress: Called with the current state.
    """
    return [
        *_large(mpis, effort, progress),
        *_private(mpis, effort, progress),
        *_small(mpis, effort, progress),
        *_crowded(mpis, effort, progress),
        *_training(steps, progress),
        *_footprints(steps, progress),
    ]


def _large(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Target]:
    plan = replace(effort, nbytes=(BUCKET, 100 * MIB))
    libraries = select(["gloo", "smddp", *ANY_MPI, "lower_bound", "memcpy"])
    report = runner.run(plan, libraries, mpis, progress)
    bucket, large = Findings(report, "float32", BUCKET), Findings(report, "float32", 100 * MIB)
    what = "25 MiB float32, registered"
    return [
        _near_floor(bucket, what),
        bucket.faster(what, "smddp", ["gloo"], 12, "gloo"),
        bucket.faster(what, "smddp", ANY_MPI, 2.5, "the best MPI"),
        large.faster("100 MiB float32, registered", "smddp", ["gloo"], 8, "gloo"),
    ]


def _near_floor(found: Findings, what: str) -> Target:
    us, lower_bound = found.us("smddp"), found.us("lower_bound")
    required = "1.3 x the zero-copy lower bound or less"
    if us is None or lower_bound is None:
        return Target(what, required, _time(us), found.others("smddp"))
    ratio = us / lower_bound
    measured = f"{_time(us)}: {-_down(-ratio):.2f} x the lower bound"
    return Target(what, required, measured, found.others("smddp"), ratio <= 1.3)


def _private(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Target]:
    plan = replace(effort, nbytes=(BUCKET,), dtypes=("float32", "bfloat16", "float16"))
    smddp = "smddp-unregistered"
    report = runner.run(plan, select(["gloo", smddp, *ANY_MPI]), mpis, progress)
    found = {dtype: Findings(report, dtype, BUCKET) for dtype in plan.dtypes}
    what = "25 MiB {}, unregistered".format
    full = found["float32"]
    return [
        full.faster(what("float32"), smddp, ["gloo"], 4, "gloo"),
        full.faster(what("float32"), smddp, DEFAULT_MPI, 1, "MPI's default"),
        *(
            found[dtype].faster(what(dtype), smddp, ["gloo"], 5, "gloo")
            for dtype in plan.dtypes[1:]
        ),
    ]


def _small(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Target]:
    plan = replace(effort, nbytes=(4096,))
    libraries = select(["gloo", "smddp", "core-unregistered", *DEFAULT_MPI])
    found = Findings(runner.run(plan, libraries, mpis, progress), "float32", 4096)
    return [
        found.at_most("4 KiB, Group.all_reduce", "core-unregistered", 6),
        found.at_most("4 KiB, dist.all_reduce", "smddp", 25),
    ]


def _crowded(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Target]:
    plan = replace(effort, ranks=4, nbytes=(BUCKET,))
    libraries = select(["gloo", "smddp", "openmpi"])
    bucket = Findings(runner.run(plan, libraries, mpis, progress), "float32", BUCKET)
    waiting = runner.barrier_plan(plan)
    barrier = Findings(runner.run(waiting, libraries, mpis, progress), *runner.BARRIER_CELL)
    return [
        bucket.faster("four ranks, 25 MiB float32", "smddp", ["gloo"], 1, "gloo"),
        barrier.at_most("four ranks, barrier", "smddp", 1000),
    ]


def _training(plan: ddp.DdpPlan, progress: Progress) -> list[Target]:
    what = "DDP step, 41 M parameters"
    try:
        report = ddp.run(plan, progress)
    except JobError as error:
        return [Target(what, "95 % of no communication, 1.3 x gloo", str(error))]
    smddp = report.find("smddp")
    assert smddp is not None
    ms, share, times = smddp.us / 1e3, ddp.share(report, smddp), report.speedup(smddp) or 0.0
    others = ", ".join(
        f"{m.variant} {m.us / 1e3:.0f} ms" for m in report.measurements if m is not smddp
    )
    taken, shown = f"{ms:.0f} ms", f"{_down(share, 3):.1%}"
    return [
        Target(what, "95 % of no communication", f"{taken}: {shown}", others, share >= 0.95),
        Target(what, "1.3 x gloo", f"{taken}: {_down(times):.2f} x gloo", others, times >= 1.3),
    ]


def _footprints(plan: ddp.DdpPlan, progress: Progress) -> list[Target]:
    required = "one bucket (25 MiB) per process beyond gloo's, or less"
    try:
        report = memory.run(replace(plan, backends=("gloo", "smddp")), progress)
    except JobError as error:
        return [Target("memory, DDP", required, str(error))]
    gloo, smddp = report.jobs
    more = report.beyond_first(smddp, "pss")
    others = ", ".join(
        f"{job.backend}: Pss {job.mean('pss') / MIB:.0f}, Rss {job.mean('rss') / MIB:.0f}, "
        f"Shmem +{job.shmem_growth / MIB:.0f} MiB"
        for job in (gloo, smddp)
    )
    shown = f"Pss {-_down(-more / MIB, 1):+.1f} MiB"
    return [Target("memory, DDP", required, shown, others, more <= BUCKET)]


def targets_table(targets: Sequence[Target]) -> Table:
    """Return a table with one row per target."""
    table = Table(title="Performance targets", box=box.SIMPLE_HEAD)
    for name in ("what", "target", "measured", "others in the same run", "verdict"):
        table.add_column(name)
    words = {True: "[green]reached[/]", False: "[red]missed[/]", None: "not measured"}
    above = ""
    for target in targets:
        others = "as above" if target.others and target.others == above else target.others
        table.add_row(target.what, target.required, target.measured, others, words[target.reached])
        above = target.others
    return table


def to_json(targets: Sequence[Target]) -> dict[str, Any]:
    """Return plain data."""
    return {"schema": 1, "operation": "targets", "targets": [asdict(target) for target in targets]}


def _down(value: float, digits: int = 2) -> float:
    """Round down, so that a missed target does not look reached."""
    return math.floor(value * 10**digits) / 10**digits


def _time(us: float | None) -> str:
    return "not measured" if us is None else format_time(us)
