"""The ranks that `scaling` commands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from benchmarks.ddp_variants import NO_COMM
from benchmarks.job import Job, JobSpec
from benchmarks.mpi import MpiInstall
from benchmarks.results import step_us
from benchmarks.scaling.plan import WORKLOADS, ScalingPlan
from benchmarks.testbed import start
from benchmarks.testbed.network import Network

TASK = "benchmarks.scaling.task:ScalingTask"
GLOO, SMDDP = "gloo", "smddp"
TRAINING = {"optimizer": "sgd", "bucket_view": False}


class VariantJobs:
    """The jobs of a layout, whose variants alternate.

    Steps without communication, with gloo and with smddp over gloo run in the same processes. Steps
    over MPI need processes of their own and alternate with them.
    """

    def __init__(self, plan: ScalingPlan, mpi: MpiInstall | None, network: Network) -> None:
        self._stack = ExitStack()
        self._place: dict[str, tuple[Job, str]] = {}  # by variant: its job, and its name there
        try:
            names = [NO_COMM, GLOO, SMDDP]
            job = self._stack.enter_context(Job(job_spec(plan, names, None, network)))
            self._place |= {name: (job, name) for name in names}
            self.size = job.call("describe")[0]
            if mpi:
                job = self._stack.enter_context(Job(job_spec(plan, [SMDDP], mpi, network)))
                self._place[f"{SMDDP}-{mpi.flavour}"] = (job, SMDDP)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> VariantJobs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def variants(self) -> list[str]:
        """All variants, in the order of the tables."""
        return list(self._place)

    def turn(self, steps: int, variants: Sequence[str] = ()) -> dict[str, float]:
        """Return the microseconds per step of the given variants, or of all."""
        return {name: self._train(name, steps) for name in variants or self.variants}

    def _train(self, variant: str, steps: int) -> float:
        job, name = self._place[variant]
        return step_us(job.call("train", {"variant": name, "steps": 1 + steps}), warm_up=1)

    def outcome(self, variant: str) -> tuple[bool, NDArray[np.float32]]:
        """Return whether all ranks' weights and gradients are equal, and rank 0's gradients.

        This must be the last call for a variant: it discards the trained weights.
        """
        job, name = self._place[variant]
        ranks = job.call("outcome", {"variant": name})
        digests = {(rank["weights"], rank["gradients"]) for rank in ranks}
        return len(digests) == 1, ranks[0]["vector"]


def job_spec(
    plan: ScalingPlan, names: Sequence[str], mpi: MpiInstall | None, network: Network
) -> JobSpec:
    """Return the job that trains these variants."""
    return JobSpec(
        name=f"{plan.model} on {plan.layout}",
        task=TASK,
        arguments={
            "variants": list(names),
            "setting": {**TRAINING, **plan.setting},
            "workload": WORKLOADS[plan.model],
        },
        ranks=plan.layout.nodes * plan.layout.ranks,
        environment={"SDP_INTERNODE": "mpi" if mpi else "gloo"},
        mpi=mpi,
        start=start.on(network),
    )
