"""One rank of one group, as its segment shows it: identity, state and last operations."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sdp_plugins.core import _native, counters
from sdp_plugins.core.counters import Counters
from sdp_plugins.core.process_identity import clock_id, namespace, process_state
from sdp_plugins.core.rank_info import Forming, RankInfo
from sdp_plugins.core.rank_names import printable
from sdp_plugins.core.trace_event import ASYNC, COMPARE, FAILED, NBYTES, STEP, TraceEvent, unpack
from sdp_plugins.flight.untrusted import (
    forming_from_json,
    forming_from_text,
    rank_info_from_json,
    rank_info_from_text,
)

_HEAD = struct.Struct("<QiiIIII8i512s")
_FORMING = struct.Struct(f"<Q{_native.FLIGHT_FORMING_BYTES}s")
_STAMP = struct.Struct("<Q")
_N_RINGS = len(_native.FLIGHT_SLOTS)
_FORMING_AT = _HEAD.size + _native.FLIGHT_RANK_INFO_BYTES
_COUNTERS_AT = _FORMING_AT + _FORMING.size
_RINGS_AT = _COUNTERS_AT + counters.NBYTES + _N_RINGS * _STAMP.size
_SLOT_NBYTES = _STAMP.size + NBYTES
STATES = ("open", "left", "failed")
LIVENESS = ("running", "stopped", "ended", "unknown")
_N_OPS, _N_DTYPES, _N_REDUCE_OPS = map(len, (_native.Op, _native.DType, _native.ReduceOp))
_ALL_FLAGS = FAILED | ASYNC | STEP | COMPARE
_MOST_NS = 2**63 - 1
_MOST_CAUSE = 1000
_MOST_KEPT = 1 << 14  # slots: who reads again finds most of them unchanged


class RankSnapshot(NamedTuple):
    """A rank of a group, as it was when it was read.

    Attributes:
        info: Which rank of which group.
        read_ns: When it was read, by the rank's CLOCK_MONOTONIC.
        read_unix_ns: The same moment by the wall clock.
        state: ``open``, ``left`` (closed without a failure) or ``failed``.
        cause: Why the group has failed on this rank.
        step: Counts the synchronisation steps of the node's collectives.
        liveness: State of the process: ``running``, ``stopped``, ``ended`` or ``unknown``.
        forming: The group that the process is making; None: it is making none.
        counters: What the rank has done since the group was made.
        operations: The rank's last collectives, in the order in which they were issued.
        messages: Its last sends and receives.
        steps: The last steps on this node of operations of a group that spans nodes.
    """

    info: RankInfo
    read_ns: int
    read_unix_ns: int
    state: str
    cause: str
    step: int
    liveness: str
    forming: Forming | None
    counters: Counters
    operations: tuple[TraceEvent, ...]
    messages: tuple[TraceEvent, ...]
    steps: tuple[TraceEvent, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields, as a report file holds them."""
        forming = self.forming and self.forming.to_json()
        return self._asdict() | {"info": self.info.to_json(), "forming": forming}

    @classmethod
    def from_json(cls, found: Any) -> RankSnapshot:
        """Read what `to_json` has written.

        Raises:
            ValueError, TypeError, KeyError: It was something else.
        """
        fields = {**found, "info": rank_info_from_json(found["info"])}
        fields["forming"] = forming_from_json(fields["forming"])
        fields["counters"] = _counters(fields["counters"])
        for name in cls._fields[-_N_RINGS:]:
            fields[name] = tuple(map(_event, fields[name]))
        snapshot = cls(**fields)
        numbers = (snapshot.read_ns, snapshot.read_unix_ns, snapshot.step)
        sane = all(type(n) is int and 0 <= n <= _MOST_NS for n in numbers)
        known = snapshot.state in STATES and snapshot.liveness in LIVENESS
        if not (sane and known and type(snapshot.cause) is str):
            raise ValueError("it is not a snapshot of a rank")
        return snapshot._replace(cause=printable(snapshot.cause, _MOST_CAUSE))


def liveness(info: RankInfo) -> str:
    """The state of a rank's process: see `RankSnapshot`."""
    if info.clock != clock_id() or info.pid_namespace != namespace("pid"):
        return "unknown"
    return liveness_of_process(info.process)


def liveness_of_process(identity: str) -> str:
    """The state of a process of this machine: see `RankSnapshot`."""
    state = process_state(identity)
    return "stopped" if state in ("T", "t") else "running" if state else "ended"


def parse(raw: bytes) -> RankSnapshot:
    """Parse bytes that were just read by ``NativeGroup.flight`` or ``read_flight``, without trust.

    Raises:
        ValueError: They do not identify a rank.
    """
    _, _, _, _, state, _, step, *_, cause = _HEAD.unpack_from(raw)
    info = rank_info_from_text(raw[_HEAD.size : _FORMING_AT])
    forming = forming_from_text(*_FORMING.unpack_from(raw, _FORMING_AT))
    text = printable(cause.partition(b"\0")[0].decode(errors="replace"), _MOST_CAUSE)
    shown = STATES[state] if state < len(STATES) else "open"
    counted = Counters.unpack(raw, _COUNTERS_AT)
    rings = [tuple(ring) for ring in _rings(raw)]
    now = time.monotonic_ns(), time.time_ns()
    return RankSnapshot(info, *now, shown, text, step, "unknown", forming, counted, *rings)


def _rings(raw: bytes) -> Iterator[list[TraceEvent]]:
    at = _RINGS_AT
    for count in _native.FLIGHT_SLOTS:
        end = at + count * _SLOT_NBYTES
        slots = (raw[begin : begin + _SLOT_NBYTES] for begin in range(at, end, _SLOT_NBYTES))
        yield [event for _, event in sorted(filter(None, map(_stamped, slots)))]
        at = end


@lru_cache(_MOST_KEPT)
def _stamped(slot: bytes) -> tuple[int, TraceEvent] | None:
    """A slot's stamp and event; None if it is empty, or makes no sense."""
    (stamp,) = _STAMP.unpack_from(slot)
    if not stamp:
        return None
    (event,) = unpack(slot[_STAMP.size :])
    return (stamp, event) if plausible(event) else None


def plausible(event: TraceEvent) -> bool:
    """Whether the names and times of an event can be shown."""
    known = (
        event.op < _N_OPS
        and event.dtype < _N_DTYPES
        and event.reduce_op < _N_REDUCE_OPS
        and event.flags <= _ALL_FLAGS
        and event.path <= 255
    )
    times = (event.issued, event.started, event.arrived, event.finished, event.waited)
    return known and event.issued > 0 and min(times) >= 0 and max(times) <= _MOST_NS


def _counters(row: Any) -> Counters:
    if not all(type(value) is int and 0 <= value < 2**64 for value in row):
        raise TypeError("counters are a row of numbers")
    return Counters._make(row)


def _event(row: Sequence[Any]) -> TraceEvent:
    if not isinstance(row, list) or not all(type(value) is int for value in row):
        raise TypeError("an event is a row of numbers")
    event = TraceEvent._make(row)
    if min(row) < -1 or not plausible(event):
        raise TypeError("an event has impossible values")
    return event


def latest(snapshots: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """The snapshot of each rank in each group that was read last."""
    found: dict[tuple[int, int], RankSnapshot] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.read_ns):
        found[snapshot.info.token, snapshot.info.rank] = snapshot
    return [found[key] for key in sorted(found)]
