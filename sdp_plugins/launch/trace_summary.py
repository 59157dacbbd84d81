"""What a merged trace says in numbers: who was late, and what went on beside the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from sdp_plugins.launch.trace_files import Json, end_of

Stretch = tuple[float, float]
SMALL = 0.01
"""A collective with less than this part of a step's bytes carries no gradients: a loss, a flag."""


def summary(trace: Json) -> str:
    """Some lines for a terminal."""
    lines = [*_ranks(trace), *_steps(trace), *_notes(trace["otherData"])]
    return "\n".join(lines)


def slices(trace: Json, cat: str) -> list[Json]:
    """Slices of one category, of all ranks."""
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == cat]


# ---- ranks --------------------------------------------------------------------------------------


def _ranks(trace: Json) -> list[str]:
    by_rank: dict[int, list[Json]] = defaultdict(list)
    for event in slices(trace, "collective"):
        by_rank[event["pid"]].append(event)
    late = _lateness(by_rank)
    lines = ["rank  collectives  queued ms  running ms  of it waiting ms  last to arrive"]
    for rank, events in sorted(by_rank.items()):
        queued = sum(event["args"]["queued_us"] for event in events) / 1e3
        running = sum(event["dur"] for event in events) / 1e3
        waiting = sum(event["args"].get("waiting_us", 0.0) for event in events) / 1e3
        times = late[rank]
        who = f"{len(times)} times" + (
            f", by {median(times) / 1e3:.3f} ms in the median" if times else ""
        )
        lines.append(
            f"{rank:4}  {len(events):11}  {queued:9.1f}  {running:10.1f}  {waiting:16.1f}  {who}"
        )
    return lines


def _lateness(by_rank: dict[int, list[Json]]) -> dict[int, list[float]]:
    """By how much each rank was later than the first one, where it was the last."""
    late: dict[int, list[float]] = defaultdict(list)
    for rank, events in by_rank.items():
        for event in events:
            args = event["args"]
            if args.get("last to arrive") == f"rank {rank}" and "late_us" in args:
                late[rank].append(args["late_us"])
    return late


# ---- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """A rank's steps; microseconds.

    Attributes:
        steps: How many.
        step: Of one, in the median.
        running: Of communication in one, in the median.
        beside: Part of the communication that ran beside the backward pass.
        moving: As `running`, from when the last rank of the node had come.
        moving_beside: Part of that beside the backward pass.
    """

    steps: int
    step: float
    running: float
    beside: float
    moving: float
    moving_beside: float


def _steps(trace: Json) -> list[str]:
    found = overlap(trace)
    if not found:
        return []
    lines = ["", "rank  steps  step ms  communication ms  beside backward  of it moving ms  beside"]
    for rank, one in sorted(found.items()):
        lines.append(
            f"{rank:4}  {one.steps:5}  {one.step / 1e3:7.1f}  {one.running / 1e3:16.1f}  "
            f"{one.beside:15.0%}  {one.moving / 1e3:15.1f}  {one.moving_beside:6.0%}"
        )
    return lines


def overlap(trace: Json) -> dict[int, Overlap]:
    """How much of the communication of spans called ``step`` went on beside the backward pass.

    A bucket of gradients is handed over when its last gradient is there, so the last one to be
    issued marks the end of the backward pass: what has run before that has run beside it.
    """
    running, found = slices(trace, "collective"), {}
    steps = [span for span in slices(trace, "span") if span["name"] == "step"]
    for rank in sorted({step["pid"] for step in steps}):
        mine = [event for event in running if event["pid"] == rank]
        durations = [step["dur"] for step in steps if step["pid"] == rank]
        buckets = [_buckets(step, mine) for step in steps if step["pid"] == rank]
        if all(buckets):
            whole = [_beside(part, waiting=True) for part in buckets]
            moving = [_beside(part, waiting=False) for part in buckets]
            found[rank] = Overlap(len(buckets), median(durations), *_parts(whole), *_parts(moving))
    return found


def _parts(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """The median of a step's, and the part of all that ran beside the backward pass."""
    in_all = sum(all_ for all_, _ in measured)
    beside = sum(beside for _, beside in measured) / in_all if in_all else 0.0
    return median(all_ for all_, _ in measured), beside


def _buckets(step: Json, events: Iterable[Json]) -> list[Json]:
    """What carries gradients in a step."""
    inside = [e for e in events if step["ts"] <= _issued(e) < end_of(step)]
    least = SMALL * sum(event["args"]["bytes"] for event in inside)
    return [event for event in inside if event["args"]["bytes"] > least]


def _beside(buckets: list[Json], *, waiting: bool) -> tuple[float, float]:
    """How long a step's communication runs, and of it beside the backward pass."""
    end = max(map(_issued, buckets))
    stretches = [
        (event["ts"] + (0.0 if waiting else event["args"].get("waiting_us", 0.0)), end_of(event))
        for event in buckets
    ]
    return united(stretches), united((begin, min(end, until)) for begin, until in stretches)


def _issued(event: Json) -> float:
    return float(event["ts"]) - float(event["args"]["queued_us"])


def united(stretches: Iterable[Stretch]) -> float:
    """Length of what stretches cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


# ---- what to know of the trace itself -----------------------------------------------------------


def _notes(about: Json) -> list[str]:
    notes = [f"rank {rank}: {why}" for rank, by in about["failures"].items() for why in by.values()]
    if about["ranks_without_a_trace"]:
        ranks = ", ".join(map(str, about["ranks_without_a_trace"]))
        notes.append(f"no trace of rank {ranks}: killed, or without SDP_TRACE")
    for rank, groups in about["dropped"].items():
        notes += [f"rank {rank}: {n} earlier operations of {g} dropped" for g, n in groups.items()]
    for clock, offset in about["clocks"].items():
        if offset["accuracy_us"] is None:
            notes.append(f"clock {clock}: aligned by the nodes' wall clocks only")
        elif offset["accuracy_us"]:
            notes.append(f"clock {clock}: aligned to {offset['accuracy_us'] / 1e3:.3f} ms")
    return ["", *notes] if notes else []
