"""What a merged trace says in numbers: who was late, and what went on beside the backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

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


def _steps(trace: Json) -> list[str]:
    found = overlap(trace)
    if not found:
        return []
    lines = ["", "rank  steps  step ms  communication ms  before the last gradients were ready"]
    for rank, numbers in sorted(found.items()):
        lines.append(
            f"{rank:4}  {numbers['steps']:5}  {numbers['step_ms']:7.1f}  "
            f"{numbers['communication_ms']:16.1f}  {numbers['overlapped']:.0%}"
        )
    return lines


def overlap(trace: Json) -> dict[int, dict[str, Any]]:
    """How much of the communication of spans called ``step`` went on beside the backward pass.

    A bucket of gradients is handed over when its last gradient is there, so the last one to be
    issued marks the end of the backward pass: what has run before that has run beside it. What a
    rank spends on waiting for others in an operation counts as communication.
    """
    running, found = slices(trace, "collective"), {}
    steps = [span for span in slices(trace, "span") if span["name"] == "step"]
    for rank in sorted({step["pid"] for step in steps}):
        mine = [event for event in running if event["pid"] == rank]
        parts = [_step(step, mine) for step in steps if step["pid"] == rank]
        parts = [part for part in parts if part[0] > 0]
        if parts:
            found[rank] = {
                "steps": len(parts),
                "step_ms": median(part[2] for part in parts) / 1e3,
                "communication_ms": median(part[0] for part in parts) / 1e3,
                "overlapped": sum(part[1] for part in parts) / sum(part[0] for part in parts),
            }
    return found


def _step(step: Json, events: Iterable[Json]) -> tuple[float, float, float]:
    """Microseconds of communication of gradients, of it beside the backward pass, and in all."""
    inside = [e for e in events if step["ts"] <= _issued(e) < end_of(step)]
    least = SMALL * sum(event["args"]["bytes"] for event in inside)
    buckets = [event for event in inside if event["args"]["bytes"] > least]
    if not buckets:
        return 0.0, 0.0, step["dur"]
    end = max(map(_issued, buckets))
    busy = united((event["ts"], end_of(event)) for event in buckets)
    beside = united((event["ts"], min(end, end_of(event))) for event in buckets)
    return busy, beside, step["dur"]


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
