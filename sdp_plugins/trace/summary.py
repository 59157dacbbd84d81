"""Summarizes a merged trace: which ranks were late."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.trace.compare import Verdicts, absentees
from sdp_plugins.trace.rank_trace import RankTrace
from sdp_plugins.trace.trace_file import Json


def summary(traces: list[RankTrace], verdicts: Verdicts, about: Json) -> str:
    """Summarize a merged trace, of which `about` is the ``otherData``, for a terminal."""
    notes = [*_absences(traces, verdicts), *_notes(about)]
    lines = [*_ranks(traces, verdicts), *([""] if notes else []), *notes]
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


# ---- notes on the trace itself ------------------------------------------------------------------


def _notes(about: Json) -> list[str]:
    notes = [f"rank {rank}: {why}" for rank, by in about["failures"].items() for why in by.values()]
    if about["ranks_without_a_trace"]:
        ranks = name_ranks(about["ranks_without_a_trace"])
        notes.append(f"no trace of {ranks}: killed, or without SDP_TRACE")
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
