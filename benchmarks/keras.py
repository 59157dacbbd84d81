"""Keras training: under the strategy, without communication, and with TensorFlow's strategy."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks import machine
from benchmarks.job import Job, JobSpec, Start
from benchmarks.mpi import MpiInstall
from benchmarks.results import Measurement, Progress, Report, alternate, step_us
from benchmarks.table import ROUNDS, Column, milliseconds, render, variant

TASK = "benchmarks.keras_task:KerasTask"
BACKENDS = ("tensorflow", "torch", "jax")
NO_COMM, OURS, ELASTIC, ALONE = "no_comm", "smddp", "elastic", "alone"
MIRRORED, MIRRORED_HUGE = "mwms", "mwms, huge pages"
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1"}  # like OMP_NUM_THREADS; XLA reads NPROC
AS_STARTED_BY_HAND = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}  # only `sdp run` sets it to 1


@dataclass(frozen=True)
class KerasPlan:
    """The settings of the `keras` benchmark.

    Attributes:
        backend: Keras' backend.
        ranks: Number of processes.
        rows: Rows of the global batch.
        layers: Number of hidden layers.
        width: Width of the hidden layers; three of 4096 make 38.6 million parameters.
        rounds: Turns of every method.
        steps: Timed steps in a turn; two untimed steps precede them.
        optimizer: Keras' name of it, with its defaults.
        gbit: Speed of the links between ranks, each on a node of a testbed; None: all ranks are
            on this machine.
    """

    backend: str = "tensorflow"
    ranks: int = 2
    rows: int = 16
    layers: int = 3
    width: int = 4096
    rounds: int = 5
    steps: int = 8
    optimizer: str = "sgd"
    gbit: float | None = None


def run(
    plan: KerasPlan,
    progress: Progress = lambda text: None,
    mpi: MpiInstall | None = None,
    start: Start | None = None,
) -> Report:
    """Train with all methods, alternating.

    Args:
        plan: The settings.
        progress: Called with the current state.
        mpi: Starts the ranks; smddp uses it between nodes.
        start: Starts the ranks on nodes of a testbed.

    Raises:
        JobError: A rank failed.
    """
    report = Report("keras", asdict(plan), machine.describe())
    with ExitStack() as stack:
        progress("starting")
        jobs = _start_jobs(plan, mpi, start, stack)

        def turn(way: str) -> float:
            name = MIRRORED if way == MIRRORED_HUGE else way
            return step_us(jobs[way].call("run", {"way": name, "steps": plan.steps}))

        report.facts["parameters"] = jobs[OURS].call("parameters")[0]
        rounds = alternate(list(jobs), plan.rounds, turn, progress)
    report.measurements = [Measurement(way, us) for way, us in rounds.items()]
    return report


def _start_jobs(
    plan: KerasPlan, mpi: MpiInstall | None, start: Start | None, stack: ExitStack
) -> dict[str, Job]:
    """Start the job of each method; some share one."""
    spec = _spec(plan, OURS, mpi=mpi, start=start) if start else _spec(plan, OURS)
    ours = stack.enter_context(Job(spec))
    jobs = {NO_COMM: ours, OURS: ours, (ALONE if start else ELASTIC): ours}
    if not start and plan.backend == "tensorflow" and plan.ranks > 1:
        for way, environment in ((MIRRORED, AS_STARTED_BY_HAND), (MIRRORED_HUGE, {})):
            jobs[way] = stack.enter_context(Job(_spec(plan, MIRRORED, environment)))
    return jobs


def overlapped(report: Report) -> float | None:
    """Return how much of the shorter one of communication and computation overlapped."""
    if ALONE not in report.variants:
        return None
    apart = (report.us(NO_COMM), report.us(ALONE))
    return max(0.0, sum(apart) - report.us(OURS)) / min(apart)


def _spec(
    plan: KerasPlan, way: str, environment: dict[str, str] | None = None, **where: Any
) -> JobSpec:
    workers = _addresses(plan.ranks) if way == MIRRORED else []
    sizes = {"layers": plan.layers, "width": plan.width, "rows": plan.rows}
    task = {"backend": plan.backend, "workers": workers, "optimizer": plan.optimizer, **sizes}
    task["elastic"] = not (workers or where)
    variables = ONE_THREAD | (environment or {}) | ({"SDP_INTERNODE": "mpi"} if where else {})
    return JobSpec(f"keras {way}", TASK, plan.ranks, task, environment=variables, **where)


def keras_table(report: Report) -> Table:
    """Return a table with one row per method."""
    s = report.settings
    caption = (
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps, one thread for each "
        "rank; no_comm: every rank trains its own model with its part of the batch"
    )
    if ELASTIC in report.variants:
        caption += "; elastic: SMDDPStrategy(elastic=True)"
    if MIRRORED in report.variants:
        caption += (
            "; mwms: MultiWorkerMirroredStrategy, as it is started by hand and with the huge pages "
            "that sdp run gives to all other ways"
        )
    if (beside := overlapped(report)) is not None:
        caption += (
            "; alone: its gradients are averaged, and nothing else; "
            f"{100 * beside:.0f} % of the shorter of both overlapped"
        )
    where = f"{s['ranks']} nodes on links of {s['gbit']:g} Gbit/s" if s["gbit"] else "one machine"
    return render(
        report,
        f"Keras on {s['backend']}: a step of {report.facts['parameters'] / 1e6:.1f} M parameters "
        f"with {s['optimizer']}, {s['ranks']} ranks, global batch of {s['rows']}; {where}",
        caption,
        [
            variant("way"),
            milliseconds(),
            ROUNDS,
            Column("x no_comm", lambda m: f"{m.us / report.us(NO_COMM):.2f}"),
            Column(
                "x mwms",
                lambda m: (
                    f"{m.us / report.us(MIRRORED):.2f}" if MIRRORED in report.variants else "-"
                ),
            ),
        ],
    )


def _addresses(count: int) -> list[str]:
    """Return addresses with ports of this host that were just free."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return addresses
