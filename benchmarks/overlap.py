"""How much of a traced job's communication overlapped its backward passes.

python -m benchmarks.overlap FOLDER

FOLDER is that of `sdp run --trace`; the spans called ``step`` are measured.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sdp_plugins.trace import trace_file
from sdp_plugins.trace.folder import of_job
from sdp_plugins.trace.rank_trace import RankTrace, TracedOperation

Interval = tuple[float, float]
SMALL = 0.01
"""A collective with a smaller part of a step's bytes is no gradient: a loss, a flag."""


@dataclass(frozen=True)
class Overlap:
    """A rank's steps; times are microseconds.

    Attributes:
        steps: Number of steps.
        step: Median duration of a step.
        running: Median duration of a step's communication.
        beside: Fraction of the communication that overlapped the backward pass.
        moving: As `running`, without waiting for other ranks of the node.
        moving_beside: Fraction of that which overlapped the backward pass.
    """

    steps: int
    step: float
    running: float
    beside: float
    moving: float
    moving_beside: float


def overlap(folder: Path) -> dict[int, Overlap]:
    """How much of each rank's communication in steps overlapped the backward pass.

    A bucket is issued when its last gradient is ready, so the last bucket marks the end of the
    backward pass: communication before it has overlapped.
    """
    found = {}
    for path, about in of_job(folder, "")[0]:
        trace = RankTrace.read((path, about))
        operations = sorted(trace.all_operations, key=_issued)
        steps = [
            (event["ts"], event["ts"] + event["dur"])
            for event in trace_file.events(path)
            if event.get("cat") == "span" and event["name"] == "step"
        ]
        buckets = [_buckets(step, operations) for step in steps]
        if buckets and all(buckets):
            whole = [_beside(part, waiting=True) for part in buckets]
            moving = [_beside(part, waiting=False) for part in buckets]
            duration = median(end - begin for begin, end in steps)
            found[trace.rank] = Overlap(len(steps), duration, *_parts(whole), *_parts(moving))
    return found


def _issued(operation: TracedOperation) -> float:
    return operation.begin - operation.queued


def _parts(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """The median per step, and the fraction of all that overlapped the backward pass."""
    in_all = sum(all_ for all_, _ in measured)
    beside = sum(beside for _, beside in measured) / in_all if in_all else 0.0
    return median(all_ for all_, _ in measured), beside


def _buckets(step: Interval, operations: list[TracedOperation]) -> list[TracedOperation]:
    """The operations of a step that carry gradients; all must be in the order of issue."""
    first, end = (bisect_left(operations, time, key=_issued) for time in step)
    inside = operations[first:end]
    least = SMALL * sum(one.nbytes for one in inside)
    return [one for one in inside if one.nbytes > least]


def _beside(buckets: list[TracedOperation], *, waiting: bool) -> tuple[float, float]:
    """Duration of a step's communication, and of the part that overlapped the backward pass."""
    last = max(map(_issued, buckets))
    stretches = [(one.begin + (0.0 if waiting else one.waiting), one.end) for one in buckets]
    return united(stretches), united((begin, min(last, end)) for begin, end in stretches)


def united(stretches: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def main(folder: str) -> None:
    """Print a table."""
    print("rank  steps  step ms  communication ms  beside backward  of it moving ms  beside")
    for rank, one in sorted(overlap(Path(folder)).items()):
        print(
            f"{rank:4}  {one.steps:5}  {one.step / 1e3:7.1f}  {one.running / 1e3:16.1f}  "
            f"{one.beside:15.0%}  {one.moving / 1e3:15.1f}  {one.moving_beside:6.0%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
