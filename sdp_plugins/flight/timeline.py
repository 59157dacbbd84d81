"""The flight recorder's operations as a Chrome trace; a recorded trace shows more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.chrome import RecordedGroup, draw


def write(path: Path, snapshots: Sequence[RankSnapshot]) -> None:
    """Write all ranks of one job into one file, for Perfetto.

    Ranks of several machines are aligned by the wall clocks.

    Raises:
        OSError: It cannot be written.
    """
    events = (event for rank in _by_rank(snapshots) for event in _events(rank))
    # Not the format of recorded traces, which `sdp run --trace` replaces.
    about = {"format": "sdp_plugins flight 1", "job": snapshots[0].info.job}
    trace_file.write(path, about, events)


def _by_rank(snapshots: Sequence[RankSnapshot]) -> list[list[RankSnapshot]]:
    found: dict[tuple[str, str], list[RankSnapshot]] = {}
    for snapshot in snapshots:
        found.setdefault((snapshot.info.host, snapshot.info.process), []).append(snapshot)
    return list(found.values())


def _events(rank: Sequence[RankSnapshot]) -> Iterator[dict[str, Any]]:
    largest = max((snapshot.info for snapshot in rank), key=lambda info: info.world_size)
    shift_us = (rank[0].read_unix_ns - rank[0].read_ns) / 1000
    for event in draw(largest.global_rank, largest.host, [*_recorded(rank)], ()):
        yield event | ({"ts": round(event["ts"] + shift_us, 3)} if "ts" in event else {})


def _recorded(rank: Sequence[RankSnapshot]) -> Iterator[RecordedGroup]:
    labels: dict[str, int] = {}
    for snapshot in rank:
        info = snapshot.info
        labels[info.name] = number = labels.get(info.name, 0) + 1
        label = info.name if number == 1 else f"{info.name} ({number})"
        events = [*snapshot.operations, *snapshot.messages, *snapshot.steps]
        yield RecordedGroup(
            info.name, info, number, label, events, 0, snapshot.cause, snapshot.read_ns
        )
