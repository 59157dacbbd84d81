"""Summarizes a merged trace: which ranks were late, and how much communication overlapped."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from sdp_plugins.trace.compare import Verdicts, absentees
from sdp_plugins.trace.folder import Json
from sdp_plugins.trace.rank_trace import Operation, RankTrace, Stretch

SMALL = 0.01
"""A collective with a smaller part of a step's bytes is no gradient: a loss, a flag."""


def summary(traces: list[RankTrace], verdicts: Verdicts, about: Json) -> str:
    """Summarize a merged trace for a terminal.

    Args:
        traces: The traces, by rank.
        verdicts: The comparison of their collectives.
        about: ``otherData`` of the merged trace.
    """
    notes = [*_absences(traces, verdicts), *_notes(about)]
    lines = [*_ranks(traces, verdicts), *_steps(traces), *([""] if notes else []), *notes]
    return "\n".join(lines)


# ---- ranks --------------------------------------------------------------------------------------


def _ranks(traces: list[RankTrace], verdicts: Verdicts) -> list[str]:
    late = _lateness(verdicts)
    lines = ["rank  collectives  queued ms  running ms  of it waiting ms  last to arrive"]
    for trace in traces:
        operations = [*trace.all_operations]
        queued = sum(one.queued for one in operations) / 1e3
        running = sum(one.end - one.begin for one in operations) / 1e3
        waiting = sum(one.waiting for one in operations) / 1e3
        times = late[trace.rank]
        who = f"{len(times)} times" + (
            f", by {median(times) / 1e3:.3f} ms in the median" if times else ""
        )
        lines.append(
            f"{trace.rank:4}  {len(operations):11}  {queued:9.1f}  {running:10.1f}  "
            f"{waiting:16.1f}  {who}"
        )
    return lines


def _lateness(verdicts: Verdicts) -> dict[int, list[float]]:
    """The delays of each rank after the first one, in collectives in which it was last."""
    late: dict[int, list[float]] = defaultdict(list)
    for group in verdicts.values():
        for verdict in group.values():
            if len(verdict.came) > 1 and not verdict.failed:
                late[verdict.came[-1]].append(verdict.late_us)
    return late


def _absences(traces: list[RankTrace], verdicts: Verdicts) -> list[str]:
    """The collectives that failed because ranks did not arrive in time, and which rank waited."""
    by_rank = {trace.rank: trace for trace in traces}
    lines = []
    for key, group in verdicts.items():
        for seq, verdict in group.items():
            if not verdict.failed:
                continue
            seen = {rank: by_rank[rank].operations[key][seq] for rank in verdict.came}
            rank, longest = max(seen.items(), key=lambda item: item[1].waiting)
            what = f"{longest.name} #{seq} of {key.name}"
            waited = f"rank {rank} waited {longest.waiting / 1e3:.1f} ms"
            if verdict.absent:
                lines.append(f"{absentees(verdict, {*by_rank})} did not arrive at {what}: {waited}")
            elif verdict.late_us > longest.waiting:  # the waiting ranks had given up
                late = f"{verdict.late_us / 1e3:.1f} ms late"
                lines.append(f"rank {verdict.came[-1]} arrived at {what} {late}: {waited}")
    return lines


# ---- steps --------------------------------------------------------------------------------------


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


def _steps(traces: list[RankTrace]) -> list[str]:
    found = overlap(traces)
    if not found:
        return []
    lines = ["", "rank  steps  step ms  communication ms  beside backward  of it moving ms  beside"]
    for rank, one in sorted(found.items()):
        lines.append(
            f"{rank:4}  {one.steps:5}  {one.step / 1e3:7.1f}  {one.running / 1e3:16.1f}  "
            f"{one.beside:15.0%}  {one.moving / 1e3:15.1f}  {one.moving_beside:6.0%}"
        )
    return lines


def overlap(traces: list[RankTrace]) -> dict[int, Overlap]:
    """How much of the communication in spans called ``step`` overlapped the backward pass.

    A bucket is issued when its last gradient is ready, so the last bucket marks the end of the
    backward pass: communication before it has overlapped.
    """
    found = {}
    for trace in traces:
        operations = sorted(trace.all_operations, key=lambda one: one.issued)
        durations = [end - begin for begin, end in trace.steps]
        buckets = [_buckets(step, operations) for step in trace.steps]
        if buckets and all(buckets):
            whole = [_beside(part, waiting=True) for part in buckets]
            moving = [_beside(part, waiting=False) for part in buckets]
            found[trace.rank] = Overlap(
                len(buckets), median(durations), *_parts(whole), *_parts(moving)
            )
    return found


def _parts(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """The median per step, and the fraction of all that overlapped the backward pass."""
    in_all = sum(all_ for all_, _ in measured)
    beside = sum(beside for _, beside in measured) / in_all if in_all else 0.0
    return median(all_ for all_, _ in measured), beside


def _buckets(step: Stretch, operations: list[Operation]) -> list[Operation]:
    """The operations of a step that carry gradients; all must be in the order of issue."""
    first, end = (bisect_left(operations, time, key=lambda one: one.issued) for time in step)
    inside = operations[first:end]
    least = SMALL * sum(one.nbytes for one in inside)
    return [one for one in inside if one.nbytes > least]


def _beside(buckets: list[Operation], *, waiting: bool) -> tuple[float, float]:
    """Duration of a step's communication, and of the part that overlapped the backward pass."""
    last = max(one.issued for one in buckets)
    stretches = [(one.begin + (0.0 if waiting else one.waiting), one.end) for one in buckets]
    return united(stretches), united((begin, min(last, end)) for begin, end in stretches)


def united(stretches: Iterable[Stretch]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


# ---- notes on the trace itself ------------------------------------------------------------------


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
    if about["left_out"]:
        notes.append(f"left out, of other jobs or processes: {', '.join(about['left_out'])}")
    return notes
