"""Merges the traces of all ranks into one file.

sdp trace FOLDER [JOB], or python -m sdp_plugins.trace merge FOLDER [JOB]

Writes FOLDER/trace.json, for https://ui.perfetto.dev or chrome://tracing, and prints which ranks
were late. JOB is needed only if FOLDER holds the traces of several jobs; the error lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from sdp_plugins.core.announced import announced
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.clocks import Offset, align
from sdp_plugins.trace.compare import Verdicts, compared, completed
from sdp_plugins.trace.folder import MERGED, of_job
from sdp_plugins.trace.rank_trace import RankTrace
from sdp_plugins.trace.summary import summary
from sdp_plugins.trace.trace_file import Json


def merge(folder: str | Path, job: str = "") -> str:
    """Merge the traces in a folder into its file ``trace.json``.

    Each rank's file is read twice and none is kept: a million slices do not fit into memory.

    Args:
        folder: The folder of the traces.
        job: SDP_JOB_ID of the job, or its short name; may be empty if there is only one job.

    Returns:
        The summary, for a terminal.

    Raises:
        FileNotFoundError: The folder has no traces.
        ValueError: The job is ambiguous, or a file cannot be read or replaced.
    """
    path = Path(folder) / MERGED
    if path.exists() and trace_file.about(path) is None:
        raise ValueError(f"{path} was written by something else. Hint: move the file.")
    found, left = of_job(Path(folder), job)
    with announced(f"merging the traces of {len(found)} ranks"):
        return _merged(path, found, left)


def _merged(path: Path, found: Sequence[tuple[Path, Json]], left: Sequence[Path]) -> str:
    traces = [RankTrace.read(one) for one in found]
    offsets = align(traces)
    for trace in traces:
        trace.shift_us = offsets[trace.clock].us
    origin = min((t.first_us + t.shift_us for t in traces if t.first_us < float("inf")), default=0)
    for trace in traces:
        trace.shift_us -= origin
    verdicts = compared(traces)
    about = _about(traces, offsets, origin) | {"left_out": [path.name for path in left]}
    trace_file.write(path, about, _events(traces, verdicts))
    return summary(traces, verdicts, about)


def _about(traces: list[RankTrace], offsets: dict[str, Offset], origin: float) -> Json:
    there = {trace.rank for trace in traces}
    size = traces[0].about["world_size"]
    return {
        "world_size": size,
        "ranks_without_a_trace": sorted(set(range(size)) - there),
        "began_unix_us": origin + traces[0].wall_minus_monotonic_us,
        "clocks": {clock: asdict(offset) for clock, offset in offsets.items()},
        "dropped": {str(t.rank): t.about["dropped"] for t in traces if t.about["dropped"]},
        "failures": {str(t.rank): t.about["failures"] for t in traces if t.about["failures"]},
    }


def _events(traces: list[RankTrace], verdicts: Verdicts) -> Iterator[Json]:
    """All ranks' events by one clock, completed by the comparison."""
    with_trace = {trace.rank for trace in traces}
    for trace in traces:
        for event in trace_file.events(trace.path):
            if "ts" in event:
                event["ts"] = round(event["ts"] + trace.shift_us, 3)
            if event.get("cat") == "collective":
                key, _ = trace.groups[event["args"]["group"]]
                verdict = verdicts[key][event["args"]["seq"]]
                yield from completed(event, trace.rank, verdict, with_trace)
            else:
                yield event


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        print(merge(*arguments))
    except (OSError, ValueError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    print(f"\n{Path(arguments[0]) / MERGED}: open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
