"""The bars that this library has set itself, each measured with its peers in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import ddp, memory, runner
from sdp_plugins.bench.job import RankError
from sdp_plugins.bench.mpi import MpiInstall
from sdp_plugins.bench.peers import select
from sdp_plugins.bench.results import Measurement, Report
from sdp_plugins.bench.runner import Plan, Progress
from sdp_plugins.bench.units import format_time

MIB = 2**20
BUCKET = 25 * MIB
DEFAULT_MPI = ("mpich", "openmpi")
ANY_MPI = (*DEFAULT_MPI, "openmpi-tuned")


@dataclass(frozen=True)
class Bar:
    """One line of the table.

    Attributes:
        what: What is measured.
        target: What it must reach.
        measured: What it reached.
        peers: What its peers took in the same run.
        passed: None if the peer that the bar is about was not there.
    """

    what: str
    target: str
    measured: str
    peers: str = ""
    passed: bool | None = None


class Findings:
    """Reads one size of a report."""

    def __init__(self, report: Report, dtype: str, nbytes: int) -> None:
        self._of = {
            m.peer: m for m in report.measurements if (m.dtype, m.nbytes) == (dtype, nbytes)
        }

    def us(self, peer: str) -> float | None:
        """A peer's time per call."""
        return self._of[peer].latency_us if peer in self._of else None

    def best(self, peers: Iterable[str]) -> Measurement | None:
        """The fastest of those that were measured."""
        there = [self._of[peer] for peer in peers if peer in self._of]
        return min(there, key=lambda m: m.latency_us, default=None)

    def others(self, but: str) -> str:
        """What all other peers took."""
        return ", ".join(
            f"{peer} {format_time(m.latency_us)}" for peer, m in self._of.items() if peer != but
        )

    def at_most(self, what: str, peer: str, limit_us: float) -> Bar:
        """A peer's time has a limit."""
        us = self.us(peer)
        verdict = None if us is None else us <= limit_us
        target = f"at most {format_time(limit_us)}"
        return Bar(what, target, _time(us), self.others(peer), verdict)

    def faster(self, what: str, peer: str, than: Sequence[str], times: float, name: str) -> Bar:
        """A peer is at least `times` as fast as the fastest of `than`."""
        target = f"{times:g} x {name}" if times != 1 else f"no slower than {name}"
        other, us = self.best(than), self.us(peer)
        if other is None or us is None:
            return Bar(what, target, _time(us), self.others(peer))
        ratio = other.latency_us / us
        measured = f"{_time(us)}: {ratio:.2f} x {other.peer}"
        return Bar(what, target, measured, self.others(peer), ratio >= times)


def collect(
    mpis: Sequence[MpiInstall],
    effort: Plan,
    steps: ddp.DdpPlan,
    progress: Progress = lambda text: None,
) -> list[Bar]:
    """Measure all of them.

    Args:
        mpis: Where MPIs are.
        effort: Rounds and their length; the rest of the plan is set here.
        steps: The training that the last bars measure.
        progress: Told what is going on.
    """
    return [
        *_large(mpis, effort, progress),
        *_private(mpis, effort, progress),
        *_small(mpis, effort, progress),
        *_crowded(mpis, effort, progress),
        *_training(steps, progress),
        *_footprints(steps, progress),
    ]


def _large(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Bar]:
    plan = replace(effort, nbytes=(BUCKET, 100 * MIB))
    peers = select(["gloo", "smddp", *ANY_MPI, "floor", "memcpy"])
    report = runner.run(plan, peers, mpis, progress)
    bucket, large = Findings(report, "float32", BUCKET), Findings(report, "float32", 100 * MIB)
    what = "25 MiB float32, registered"
    return [
        _near_floor(bucket, what),
        bucket.faster(what, "smddp", ["gloo"], 12, "gloo"),
        bucket.faster(what, "smddp", ANY_MPI, 2.5, "the best MPI"),
        large.faster("100 MiB float32, registered", "smddp", ["gloo"], 8, "gloo"),
    ]


def _near_floor(found: Findings, what: str) -> Bar:
    us, floor = found.us("smddp"), found.us("floor")
    target = "1.3 x the zero-copy floor or less"
    if us is None or floor is None:
        return Bar(what, target, _time(us), found.others("smddp"))
    ratio = us / floor
    measured = f"{_time(us)}: {ratio:.2f} x the floor"
    return Bar(what, target, measured, found.others("smddp"), ratio <= 1.3)


def _private(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Bar]:
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


def _small(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Bar]:
    plan = replace(effort, nbytes=(4096,))
    peers = select(["gloo", "smddp", "core-unregistered", *DEFAULT_MPI])
    found = Findings(runner.run(plan, peers, mpis, progress), "float32", 4096)
    return [
        found.at_most("4 KiB, Group.all_reduce", "core-unregistered", 6),
        found.at_most("4 KiB, dist.all_reduce", "smddp", 25),
    ]


def _crowded(mpis: Sequence[MpiInstall], effort: Plan, progress: Progress) -> list[Bar]:
    plan = replace(effort, ranks=4, nbytes=(BUCKET,))
    peers = select(["gloo", "smddp", "openmpi"])
    bucket = Findings(runner.run(plan, peers, mpis, progress), "float32", BUCKET)
    waiting = runner.barrier_plan(plan)
    barrier = Findings(runner.run(waiting, peers, mpis, progress), *runner.BARRIER_CELL)
    return [
        bucket.faster("four ranks, 25 MiB float32", "smddp", ["gloo"], 1, "gloo"),
        barrier.at_most("four ranks, barrier", "smddp", 1000),
    ]


def _training(plan: ddp.DdpPlan, progress: Progress) -> list[Bar]:
    what = "DDP step, 41 M parameters"
    try:
        report = ddp.run(plan, progress)
    except RankError as error:
        return [Bar(what, "95 % of no communication, 1.3 x gloo", str(error))]
    ms, share, faster = report.step_ms("smddp"), report.share("smddp"), report.speedup("smddp")
    peers = ", ".join(
        f"{name} {report.step_ms(name):.0f} ms" for name in report.rounds_ms if name != "smddp"
    )
    taken = f"{ms:.0f} ms"
    return [
        Bar(what, "95 % of no communication", f"{taken}: {share:.1%}", peers, share >= 0.95),
        Bar(what, "1.3 x gloo", f"{taken}: {faster:.2f} x gloo", peers, (faster or 0) >= 1.3),
    ]


def _footprints(plan: ddp.DdpPlan, progress: Progress) -> list[Bar]:
    target = "one bucket (25 MiB) per process beyond gloo's, or less"
    try:
        report = memory.run(replace(plan, backends=("gloo", "smddp")), progress)
    except RankError as error:
        return [Bar("memory, DDP", target, str(error))]
    gloo, smddp = report.jobs
    more = report.beyond_first(smddp, "pss")
    peers = ", ".join(
        f"{job.backend}: Pss {job.mean('pss') / MIB:.0f}, Rss {job.mean('rss') / MIB:.0f}, "
        f"Shmem +{job.shmem_growth / MIB:.0f} MiB"
        for job in (gloo, smddp)
    )
    return [Bar("memory, DDP", target, f"Pss {more / MIB:+.1f} MiB", peers, more <= BUCKET)]


def bars_table(bars: Sequence[Bar]) -> Table:
    """One row per bar."""
    table = Table(title="What it must reach", box=box.SIMPLE_HEAD)
    for name in ("what", "bar", "measured", "peers in the same run", "verdict"):
        table.add_column(name)
    words = {True: "[green]reached[/]", False: "[red]missed[/]", None: "not measured"}
    above = ""
    for bar in bars:
        peers = "as above" if bar.peers and bar.peers == above else bar.peers
        table.add_row(bar.what, bar.target, bar.measured, peers, words[bar.passed])
        above = bar.peers
    return table


def to_json(bars: Sequence[Bar]) -> dict[str, Any]:
    """Plain data."""
    return {"schema": 1, "operation": "bars", "bars": [asdict(bar) for bar in bars]}


def _time(us: float | None) -> str:
    return "not measured" if us is None else format_time(us)
