"""Starts ranks, gives each part its time, and writes the results after each."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.gpu import hardware
from benchmarks.gpu.document import Document, Section
from benchmarks.gpu.plan import VARIANTS, GpuPlan, slug
from benchmarks.job import Job, JobError, JobSpec
from benchmarks.results import Progress

TASK = "benchmarks.gpu.task:GpuTask"
HERE = "benchmarks.gpu"
STACKS = "gpu_stacks"
LEAST_S = 10.0  # a part does not begin with less
CALL_LIMIT_S = 50.0
RANK_TIMEOUT_S = "30"  # then a rank tells which others it waits for
HANG_S = 25.0  # a call that fails after this has hung
MOST_HANGS = 2


@dataclass(frozen=True)
class Part:
    """Something to measure.

    Attributes:
        name: For `--parts`.
        title: What it measures.
        run: Fills the section.
        limit_s: The longest that it may take.
    """

    name: str
    title: str
    run: Callable[[Bench, Section], None]
    limit_s: float


class Bench:
    """The jobs of a run, one for each variant, which start when they are needed.

    Args:
        plan: The settings.
        folder: Where the results go.
        progress: Shows what is being done.
    """

    def __init__(self, plan: GpuPlan, folder: Path, progress: Progress = lambda text: None) -> None:
        self.plan, self.folder, self.progress = plan, folder, progress
        facts = machine.describe() | (hardware.gpu() if plan.device == "cuda" else {})
        self.document = Document(folder, asdict(plan), facts)
        self._jobs: dict[str, Job] = {}
        self._hangs: Counter[str] = Counter()
        self._deadline = self._end = time.monotonic() + plan.budget_s

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for variant in list(self._jobs):
            self._drop(variant)
        for path in self.folder.glob(f"{STACKS}_*.txt"):
            if not path.stat().st_size:
                path.unlink()

    def run(
        self, parts: Sequence[Part], show: Callable[[Section], object] = lambda section: None
    ) -> None:
        """Measure parts in order; one that fails or is late leaves its reason.

        Args:
            parts: What to measure.
            show: Called with every part's results.
        """
        for part in parts:
            section = Section(part.name, part.title)
            self.document.sections.append(section)
            start = time.monotonic()
            self._deadline = min(self._end, start + part.limit_s)
            if self._end - start < min(LEAST_S, self.plan.budget_s / 2):
                section.error = f"skipped: {self.plan.budget_s:.0f} s were over"
            else:
                self._run(part, section)
            section.seconds = time.monotonic() - start
            self.document.write()
            show(section)

    def _run(self, part: Part, section: Section) -> None:
        try:
            part.run(self, section)
        except JobError as failure:
            section.error += str(failure)
        except Exception as error:  # the other parts may still succeed
            section.error += "".join(traceback.format_exception(error))[-2000:]

    def remaining_s(self) -> float:
        """Return the seconds that the current part has left.

        Raises:
            JobError: It has none.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise JobError("the time of this part was over")
        return left

    def call(
        self, variant: str, target: str, within_s: float = CALL_LIMIT_S, **arguments: Any
    ) -> list[Any]:
        """Call a function of this package, "module:name", in a variant's ranks.

        Args:
            variant: Whose ranks.
            target: The function; its first argument is the Rank.
            within_s: Time-out, if the part has as much time left.
            **arguments: Its other arguments.

        Raises:
            JobError: A rank failed or was late. The variant's next call starts new ranks, unless
                it has hung or not started twice.
        """
        self.remaining_s()
        if self._hangs[variant] >= MOST_HANGS:
            raise JobError(f"{variant} is given up: it hung or did not start")
        start = None
        try:
            if variant not in self._jobs:
                self._start(variant)
            start = time.monotonic()
            limit_s = min(self.remaining_s(), within_s)
            given = {"target": f"{HERE}.{target}", "arguments": arguments, "limit_s": limit_s}
            return self._jobs[variant].call("run", given, limit_s)
        except JobError:
            self._hangs[variant] += start is None or time.monotonic() - start > HANG_S
            self._drop(variant)
            raise

    def _start(self, variant: str) -> None:
        self.progress(f"starting {variant}")
        backend, environment = VARIANTS[variant]
        arguments = {
            "device": self.plan.device,
            "backend": backend,
            "modules": list(self.plan.modules),
            "stacks": str(self.folder.absolute() / f"{STACKS}_{slug(variant)}"),
        }
        common = {
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "SDP_ENGINE_THREADS": str(self.plan.threads),
            "SDP_TIMEOUT_S": RANK_TIMEOUT_S,
        }
        job = Job(JobSpec(variant, TASK, self.plan.ranks, arguments, 1, {**common, **environment}))
        self._jobs[variant] = job
        self.document.machine.update(job.call("describe")[0])

    def free(self) -> None:
        """Let the ranks of all variants free their models and tensors."""
        for variant in self.plan.variants:
            self.call(variant, "calls:forget")

    def restart(self, variant: str) -> None:
        """End a variant's ranks; its next call starts new ones."""
        self._drop(variant)

    def _drop(self, variant: str) -> None:
        if variant in self._jobs:
            self._jobs.pop(variant).close()

    def alternate(
        self, variants: Iterable[str], turn: Callable[[str], float], section: Section
    ) -> dict[str, list[float]]:
        """Return the values of all rounds: A B C, A B C, ...; a variant that fails is left out.

        Args:
            variants: The variants, in the order of their turns.
            turn: Runs one turn of a variant.
            section: Gets the reasons of failures.
        """
        found: dict[str, list[float]] = {variant: [] for variant in variants}
        for number in range(self.plan.rounds):
            for variant in list(found):
                self.progress(f"{section.name}: round {number + 1}, {variant}")
                try:
                    found[variant].append(turn(variant))
                except JobError as failure:
                    section.error += f"{variant}: {failure}\n"
                    del found[variant]
        return found


def slowest(answers: Iterable[float]) -> float:
    """Return the time of the slowest rank."""
    return max(answers)


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of every variant's rounds."""
    return {variant: median(values) for variant, values in rounds.items() if values}
