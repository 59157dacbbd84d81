"""Training with Keras: under the strategy, without communication, and by TensorFlow's own means."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.cluster.network import Network
from sdp_plugins.bench.job import Job, JobSpec
from sdp_plugins.bench.mpi import MpiInstall
from sdp_plugins.bench.runner import Progress
from sdp_plugins.bench.units import format_time

TASK = "sdp_plugins.bench.keras_task:KerasTask"
BACKENDS = ("tensorflow", "torch", "jax")
NONE, OURS, ALONE = "none", "smddp", "alone"
MIRRORED, MIRRORED_HUGE = "mwms", "mwms, huge pages"
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1"}  # as OMP_NUM_THREADS; NPROC is XLA's
AS_STARTED_BY_HAND = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}  # only `sdp run` asks for them


@dataclass(frozen=True)
class KerasPlan:
    """What to train, and how often.

    Attributes:
        backend: Keras' backend.
        ranks: Processes.
        rows: Of the global batch.
        layers: Hidden ones.
        width: Of the hidden layers; three of 4096 make 38.6 million parameters.
        rounds: Turns of every way.
        steps: Timed steps in a turn; two more go before them.
        gbit: Speed of the links between ranks, each on a node of a laboratory; None: all ranks are
            on this machine.
    """

    backend: str = "tensorflow"
    ranks: int = 2
    rows: int = 16
    layers: int = 3
    width: int = 4096
    rounds: int = 5
    steps: int = 8
    gbit: float | None = None


@dataclass
class KerasReport:
    """Milliseconds per step of every round."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    parameters: int
    rounds_ms: dict[str, list[float]]

    def step_ms(self, way: str) -> float:
        """The median over the rounds."""
        return median(self.rounds_ms[way])

    @property
    def overlapped(self) -> float | None:
        """The part of communication that went on beside computing, or of computing, if less."""
        if ALONE not in self.rounds_ms:
            return None
        apart = (self.step_ms(NONE), self.step_ms(ALONE))
        return max(0.0, sum(apart) - self.step_ms(OURS)) / min(apart)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {way: round(self.step_ms(way), 3) for way in self.rounds_ms}
        return {"schema": 1, "operation": "keras", **asdict(self), "step_ms": found}


def run(
    plan: KerasPlan, mpi: MpiInstall | None = None, progress: Progress = lambda text: None
) -> KerasReport:
    """Train in all ways in turn; across nodes over an MPI.

    Raises:
        RankError: A rank failed.
    """
    host = machine.describe()
    ways = [NONE, OURS]
    rounds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        progress("starting")
        jobs = {}
        if plan.gbit:
            network = stack.enter_context(Network(plan.ranks, plan.gbit))
            jobs[OURS] = stack.enter_context(Job(_spec(plan, OURS, mpi=mpi, network=network)))
            ways.append(ALONE)
        else:
            jobs[OURS] = stack.enter_context(Job(_spec(plan, OURS)))
            if plan.backend == "tensorflow" and plan.ranks > 1:
                for way, environment in ((MIRRORED, AS_STARTED_BY_HAND), (MIRRORED_HUGE, {})):
                    spec = _spec(plan, MIRRORED, environment)
                    jobs[way] = stack.enter_context(Job(spec))
                    ways.append(way)
        parameters = jobs[OURS].call("parameters")[0]
        for number in range(plan.rounds):
            for way in ways:
                progress(f"round {number + 1} of {plan.rounds}: {way}")
                job = jobs.get(way, jobs[OURS])
                name = MIRRORED if way == MIRRORED_HUGE else way
                ranks = job.call("run", {"way": name, "steps": plan.steps})
                step_s = median(fmean(step) for step in zip(*ranks, strict=True))
                rounds.setdefault(way, []).append(1e3 * step_s)
    return KerasReport(asdict(plan), host, parameters, rounds)


def _spec(
    plan: KerasPlan, way: str, environment: dict[str, str] | None = None, **where: Any
) -> JobSpec:
    workers = _addresses(plan.ranks) if way == MIRRORED else []
    sizes = {"layers": plan.layers, "width": plan.width, "rows": plan.rows}
    task = {"backend": plan.backend, "workers": workers, **sizes}
    variables = ONE_THREAD | (environment or {}) | ({"SDP_INTERNODE": "mpi"} if where else {})
    return JobSpec(f"keras {way}", TASK, plan.ranks, task, environment=variables, **where)


def keras_table(report: KerasReport) -> Table:
    """One row per way."""
    s = report.settings
    caption = (
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps, one thread for each "
        "rank; none: every rank trains its own model with its part of the batch"
    )
    if MIRRORED in report.rounds_ms:
        caption += (
            "; mwms: MultiWorkerMirroredStrategy, as it is started by hand and with the huge pages "
            "that sdp run gives to all other ways"
        )
    if report.overlapped is not None:
        caption += (
            "; alone: its gradients are averaged, and nothing else; "
            f"{100 * report.overlapped:.0f} % of the shorter of both overlapped"
        )
    where = f"{s['ranks']} nodes on links of {s['gbit']:g} Gbit/s" if s["gbit"] else "one machine"
    table = Table(
        title=f"Keras on {s['backend']}: a step of {report.parameters / 1e6:.1f} M parameters, "
        f"{s['ranks']} ranks, global batch of {s['rows']}; {where}",
        caption=caption,
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way", no_wrap=True)
    for name in ("ms/step", "rounds", "x none", "x mwms"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, rounds in report.rounds_ms.items():
        ms = report.step_ms(way)
        mirrored = f"{ms / report.step_ms(MIRRORED):.2f}" if MIRRORED in report.rounds_ms else "-"
        table.add_row(
            way,
            f"{ms:.0f}",
            f"{format_time(1e3 * min(rounds))} - {format_time(1e3 * max(rounds))}",
            f"{ms / report.step_ms(NONE):.2f}",
            mirrored,
        )
    return table


def _addresses(count: int) -> list[str]:
    """Ports of this host that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return addresses
