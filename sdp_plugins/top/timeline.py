"""What each rank did in the last seconds: computed, waited for other ranks, communicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sdp_plugins.core import _native
from sdp_plugins.flight.rank_snapshot import RankSnapshot

SPAN_NS = 10 * 10**9
CELLS = 200
_CELL_NS = SPAN_NS // CELLS
_RING = _native.FLIGHT_SLOTS[0]


class Lane(NamedTuple):
    """One rank.

    Attributes:
        rank: Its number in the job.
        first: The first cell of which everything is known: what was before is overwritten.
        waiting: How much of each cell it has waited for other ranks, in percent; oldest cell first.
        moving: How much of each cell it was in collectives that all ranks had begun.
    """

    rank: int
    first: int
    waiting: list[int]
    moving: list[int]


def lanes_of(snapshots: Sequence[RankSnapshot]) -> list[Lane]:
    """The ranks of a job that are on this machine."""
    by_process: dict[str, list[RankSnapshot]] = {}
    for snapshot in snapshots:
        by_process.setdefault(snapshot.info.process, []).append(snapshot)
    begin_ns = max((snapshot.read_ns for snapshot in snapshots), default=0) - SPAN_NS
    complete = _complete(snapshots)
    return sorted(_lane(its, begin_ns, complete) for its in by_process.values())


def _complete(snapshots: Sequence[RankSnapshot]) -> dict[tuple[int, int], int]:
    """When the last rank began a collective that all have begun, by group and number."""
    begun: dict[tuple[int, int], list[int]] = {}
    for snapshot in snapshots:
        for event in snapshot.operations:
            if event.started:
                begun.setdefault((snapshot.info.token, event.seq), []).append(event.started)
    ranks = Counter(snapshot.info.token for snapshot in snapshots)
    return {key: max(times) for key, times in begun.items() if len(times) == ranks[key[0]]}


def _lane(
    groups: Sequence[RankSnapshot], begin_ns: int, complete: Mapping[tuple[int, int], int]
) -> Lane:
    waits, moves = [0] * CELLS, [0] * CELLS
    first_ns = begin_ns
    for snapshot in groups:
        for event in (event for event in snapshot.operations if event.started):
            end = event.finished or snapshot.read_ns
            # Of an operation that runs, the others' records show whether all have begun it.
            last = event.arrived or complete.get((snapshot.info.token, event.seq), end)
            arrived = min(max(event.started, last), end)
            _fill(waits, event.started - begin_ns, arrived - begin_ns)
            _fill(moves, arrived - begin_ns, end - begin_ns)
        if len(snapshot.operations) == _RING:
            first_ns = max(first_ns, snapshot.operations[0].issued)
    largest = max((snapshot.info for snapshot in groups), key=lambda info: info.world_size)
    first = min(CELLS, -(-(first_ns - begin_ns) // _CELL_NS))
    waiting = list(_percent(waits))
    moving = [min(part, 100 - other) for part, other in zip(_percent(moves), waiting, strict=True)]
    return Lane(largest.global_rank, first, waiting, moving)


def _fill(cells: list[int], begin: int, end: int) -> None:
    """Add a period, in nanoseconds from the first cell's begin."""
    begin, end = max(0, begin), min(SPAN_NS, end)
    for index in range(begin // _CELL_NS, min(CELLS, -(-end // _CELL_NS))):
        at = index * _CELL_NS
        cells[index] += min(end, at + _CELL_NS) - max(begin, at)


def _percent(cells: Iterable[int]) -> Iterator[int]:
    return (min(100, round(100 * cell / _CELL_NS)) for cell in cells)
