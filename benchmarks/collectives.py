"""Every collective of torch.distributed over smddp and over gloo, alternating in one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks import machine
from benchmarks.job import Job, JobSpec
from benchmarks.results import Measurement, Progress, Report, alternate
from benchmarks.runner import CALLS_PER_ROUND, condense
from benchmarks.table import Column, faster, of_case, ranks_and_threads, render, spread
from benchmarks.units import format_size, format_time

TASK = "benchmarks.collectives_task:CollectivesTask"
BACKENDS = ("gloo", "smddp")
OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send_and_receive",
    "barrier",
)
NO_BYTES = ("barrier",)


@dataclass(frozen=True)
class CollectivesPlan:
    """The settings of the `collectives` benchmark.

    Attributes:
        operations: Names from OPERATIONS.
        nbytes: Sizes of a rank's input.
        ranks: Number of processes.
        threads: Threads per process.
        rounds: Turns of each backend.
        round_s: Approximate duration of a turn.
    """

    operations: tuple[str, ...] = OPERATIONS
    nbytes: tuple[int, ...] = (4096, 2**20, 25 * 2**20)
    ranks: int = 2
    threads: int = 1
    rounds: int = 7
    round_s: float = 0.1


def run(plan: CollectivesPlan, progress: Progress = lambda text: None) -> Report:
    """Measure a plan.

    Raises:
        JobError: A rank failed.
    """
    report = Report("collectives", asdict(plan), machine.describe())
    with Job(_spec(plan)) as job:
        for operation in plan.operations:
            for nbytes in plan.nbytes[:1] if operation in NO_BYTES else plan.nbytes:
                progress(f"{operation}, {format_size(nbytes)}")
                report.measurements += _measure(job, plan, operation, nbytes)
    return report


def _spec(plan: CollectivesPlan) -> JobSpec:
    return JobSpec(
        name="collectives",
        task=TASK,
        arguments={"backends": list(BACKENDS)},
        ranks=plan.ranks,
        threads=plan.threads,
    )


def _measure(job: Job, plan: CollectivesPlan, operation: str, nbytes: int) -> list[Measurement]:
    job.call("prepare", {"operation": operation, "nbytes": nbytes})
    few, many = CALLS_PER_ROUND

    def burst(backend: str, iterations: int) -> float:
        return condense(job.call("burst", {"backend": backend, "iterations": iterations}))

    calls = {
        backend: min(many, max(few, int(plan.round_s / (burst(backend, few) / 1e6))))
        for backend in BACKENDS
    }
    rounds = alternate(
        BACKENDS, plan.rounds, lambda name: burst(name, calls[name]), lambda text: None
    )
    case = {"operation": operation, "nbytes": nbytes}
    return [Measurement(name, us, case) for name, us in rounds.items()]


def collectives_table(report: Report) -> Table:
    """Return a table with one row per operation and size."""
    host = report.machine

    def moves(m: Measurement) -> bool:
        return m.case["operation"] not in NO_BYTES

    return render(
        report,
        f"torch.distributed, {ranks_and_threads(report)}, {host['cpu']}, {host['cores']} cores",
        f"medians of {report.settings['rounds']} alternating rounds; GB/s: of what a rank gives; "
        "float32 tensors that are not shared; send_and_receive: there and back",
        [
            of_case("operation", "operation"),
            Column(
                "a rank gives", lambda m: format_size(m.case["nbytes"]) if moves(m) else "", False
            ),
            Column("gloo", lambda m: format_time(report.us("gloo", **m.case))),
            Column("smddp", lambda m: format_time(m.us)),
            Column("smddp\nrounds", spread),
            Column(
                "smddp\nGB/s", lambda m: f"{m.case['nbytes'] / m.us / 1e3:.3g}" if moves(m) else ""
            ),
            faster(report),
        ],
        only="smddp",
    )
