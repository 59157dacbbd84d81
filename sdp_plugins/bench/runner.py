"""Alternates between peers: A B C, A B C, ... so that a noisy minute hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from sdp_plugins.bench import machine
from sdp_plugins.bench.cluster.network import Network
from sdp_plugins.bench.job import Job, JobSpec, RankError
from sdp_plugins.bench.mpi import MpiInstall
from sdp_plugins.bench.peers import PeerSpec
from sdp_plugins.bench.results import Measurement, Report
from sdp_plugins.bench.values import itemsize

TASK = "sdp_plugins.bench.collective:CollectiveTask"
CALLS_PER_ROUND = (4, 2000)
BARRIER_CELL = ("float32", 4)  # where the report keeps an operation without a buffer
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        operation: "all_reduce" or "barrier".
        nbytes: Sizes of one rank's buffer.
        dtypes: Element types.
        ranks: Processes in a job.
        threads: Threads of each.
        rounds: How often every peer has its turn at every size.
        round_s: About how long a turn lasts.
    """

    operation: str = "all_reduce"
    nbytes: tuple[int, ...] = (4096,)
    dtypes: tuple[str, ...] = ("float32",)
    ranks: int = 2
    threads: int = 1
    rounds: int = 7
    round_s: float = 0.2


class Fleet:
    """One job per peer. A peer that fails is left out from then on, and the report says why."""

    def __init__(
        self,
        plan: Plan,
        report: Report,
        mpis: Sequence[MpiInstall],
        network: Network | None = None,
    ) -> None:
        self._plan = plan
        self._network = network
        self._report = report
        self._mpis = mpis
        self._jobs: dict[str, Job] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def peers(self) -> list[str]:
        """Those that still run."""
        return list(self._jobs)

    def start(self, peer: PeerSpec) -> None:
        """Start a peer's job; its ranks join their group."""
        mpi = next((m for m in self._mpis if peer.mpi in ("any", m.flavour)), None)
        if peer.mpi and mpi is None:
            what = "MPI" if peer.mpi == "any" else peer.mpi
            self._report.skipped[peer.name] = f"needs mpi4py and {what}: none found"
            return
        spec = JobSpec(
            name=peer.name,
            task=TASK,
            arguments={"target": peer.target, "options": dict(peer.options)},
            ranks=self._plan.ranks,
            threads=self._plan.threads,
            environment=peer.environment,
            mpi=mpi if peer.mpi else None,
            network=self._network,
        )
        try:
            self._jobs[peer.name] = self._stack.enter_context(Job(spec))
        except RankError as failure:
            self._report.skipped[peer.name] = str(failure)
            return
        if versions := self.call(peer.name, "version"):
            self._report.versions[peer.name] = versions[0]

    def call(self, peer: str, command: str, **arguments: object) -> list[Any] | None:
        """Command a peer; None if it failed and is out of the race."""
        try:
            return self._jobs[peer].call(command, arguments)
        except RankError as failure:
            self._report.skipped[peer] = str(failure)
            self._jobs.pop(peer).close()
            return None


def run(
    plan: Plan,
    peers: Sequence[PeerSpec],
    mpis: Sequence[MpiInstall] = (),
    progress: Progress = lambda text: None,
) -> Report:
    """Measure a plan."""
    report = Report(plan.operation, asdict(plan), machine.describe())
    with Fleet(plan, report, mpis) as fleet:
        for peer in peers:
            progress(f"starting {peer.name}")
            fleet.start(peer)
        for dtype in plan.dtypes:
            for nbytes in plan.nbytes:
                measure(plan, report, fleet, dtype, nbytes, progress)
    return report


def measure(
    plan: Plan, report: Report, fleet: Fleet, dtype: str, nbytes: int, progress: Progress
) -> None:
    """All rounds of one dtype and size."""
    count = max(1, nbytes // itemsize(dtype))
    calls = _prepare(plan, fleet, dtype, count)
    rounds: dict[str, list[float]] = {peer: [] for peer in calls}
    for number in range(plan.rounds):
        progress(f"{dtype} {nbytes} bytes: round {number + 1} of {plan.rounds}")
        for peer in [peer for peer in calls if peer in fleet.peers]:
            if samples := fleet.call(peer, "burst", iterations=calls[peer]):
                rounds[peer].append(condense(samples))
    size = count * itemsize(dtype)
    for peer in [peer for peer in calls if peer in fleet.peers]:
        path = (fleet.call(peer, "path") or [""])[0]
        found = Measurement(
            peer, plan.operation, dtype, size, plan.ranks, tuple(rounds[peer]), path
        )
        report.measurements.append(found)


def _prepare(plan: Plan, fleet: Fleet, dtype: str, count: int) -> dict[str, int]:
    """Have all peers take their buffers; how many calls each makes per round."""
    calls = {}
    few, many = CALLS_PER_ROUND
    for peer in fleet.peers:
        answers = fleet.call(peer, "prepare", operation=plan.operation, dtype=dtype, count=count)
        if answers and all("seconds" in answer for answer in answers):
            seconds = max(answer["seconds"] for answer in answers)
            calls[peer] = min(many, max(few, int(plan.round_s / max(seconds, 1e-7))))
    return calls


def condense(samples: Sequence[Sequence[int]]) -> float:
    """Nanoseconds of ranks x calls to microseconds: mean over ranks, then median over calls.

    nccl-tests, too, reports the mean over ranks. The median drops calls that an interrupt hit.
    """
    return median(fmean(call) for call in zip(*samples, strict=True)) / 1e3


def barrier_plan(plan: Plan) -> Plan:
    """The same job, timing the barrier."""
    dtype, nbytes = BARRIER_CELL
    return replace(plan, operation="barrier", nbytes=(nbytes,), dtypes=(dtype,))
