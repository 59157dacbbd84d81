"""What one rank shows of itself in one group: who it is, how it stands, its last operations."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import _native
from ..trace.events import ASYNC, COMPARE, FAILED, NBYTES, STEP, Event, unpack
from .about import About
from .meeting import NBYTES as MEETING_NBYTES
from .meeting import Meeting
from .untrusted import printable

_HEAD = struct.Struct("<QiiIIII8i512s")
_STAMP = struct.Struct("<Q")
_N_RINGS = len(_native.FLIGHT_SLOTS)
_MEETING_AT = _HEAD.size + _native.FLIGHT_ABOUT_BYTES
_RINGS_AT = _MEETING_AT + MEETING_NBYTES + _N_RINGS * _STAMP.size
_SLOT_NBYTES = _STAMP.size + NBYTES
STATES = ("open", "left", "failed")
LIVES = ("running", "stopped", "ended", "unknown")
_MOST_NS = 2**63 - 1
_MOST_CAUSE = 1000


class Sheet(NamedTuple):
    """A rank in a group, as it was when it was read.

    Attributes:
        about: Whose it is.
        read_ns: When it was read, by that rank's clock.
        read_unix_ns: The same by the clock on the wall.
        state: ``open``, ``left`` (closed in good order) or ``failed``.
        cause: Why it has failed.
        step: How far it has come in the collectives of its node.
        life: What became of its process: ``running``, ``stopped``, ``ended`` or ``unknown``.
        meeting: The group that its process is making; None: it makes none.
        operations: Its last collectives, in the order in which they were issued.
        messages: Sends and receives.
        steps: What a larger group's operation does on this node.
    """

    about: About
    read_ns: int
    read_unix_ns: int
    state: str
    cause: str
    step: int
    life: str
    meeting: Meeting | None
    operations: tuple[Event, ...]
    messages: tuple[Event, ...]
    steps: tuple[Event, ...]

    @property
    def key(self) -> tuple[int, int]:
        """The group and the rank."""
        return self.about.token, self.about.rank

    def to_json(self) -> dict[str, Any]:
        """As a report has it."""
        meeting = self.meeting and self.meeting.to_json()
        return self._asdict() | {"about": self.about.to_json(), "meeting": meeting}

    @classmethod
    def from_json(cls, found: Any) -> Sheet:
        """Read what anybody may have written.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields = {**found, "about": About.from_json(found["about"])}
            fields["meeting"] = Meeting.from_json(fields["meeting"])
            for name in cls._fields[-_N_RINGS:]:
                fields[name] = tuple(map(_event, fields[name]))
            sheet = cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError("it is no report of the flight recorder") from error
        numbers = (sheet.read_ns, sheet.read_unix_ns, sheet.step)
        sane = all(type(n) is int and 0 <= n <= _MOST_NS for n in numbers)
        words = sheet.state in STATES and sheet.life in LIVES and type(sheet.cause) is str
        if not (sane and words):
            raise ValueError("it is no report of the flight recorder")
        return sheet._replace(cause=printable(sheet.cause, _MOST_CAUSE))


def parse(raw: bytes, life: str = "unknown") -> Sheet:
    """Read what ``NativeGroup.flight`` or ``read_flight`` returns; nothing in it is believed.

    Args:
        raw: The bytes, which were read just now.
        life: See `Sheet`.

    Raises:
        ValueError: It does not say whose it is.
    """
    _, _, _, _, state, _, step, *_, cause = _HEAD.unpack_from(raw)
    about = About.unpack(raw[_HEAD.size : _MEETING_AT])
    meeting = Meeting.unpack(raw[_MEETING_AT : _MEETING_AT + MEETING_NBYTES])
    text = printable(cause.partition(b"\0")[0].decode(errors="replace"), _MOST_CAUSE)
    shown = STATES[state] if state < len(STATES) else "open"
    rings = [tuple(ring) for ring in _rings(raw)]
    now = time.monotonic_ns(), time.time_ns()
    return Sheet(about, *now, shown, text, step, life, meeting, *rings)


def _rings(raw: bytes) -> Iterator[list[Event]]:
    at = _RINGS_AT
    for count in _native.FLIGHT_SLOTS:
        end = at + count * _SLOT_NBYTES
        yield [event for _, event in sorted(_stamped(raw[at:end])) if plausible(event)]
        at = end


def _stamped(ring: bytes) -> Iterator[tuple[int, Event]]:
    for at in range(0, len(ring), _SLOT_NBYTES):
        (stamp,) = _STAMP.unpack_from(ring, at)
        if stamp:
            (event,) = unpack(ring[at + _STAMP.size : at + _SLOT_NBYTES])
            yield stamp, event


def plausible(event: Event) -> bool:
    """Whether the names and times of an event can be shown."""
    named = (
        event.op < len(_native.Op)
        and event.dtype < len(_native.DType)
        and event.reduce_op < len(_native.ReduceOp)
        and event.flags <= FAILED | ASYNC | STEP | COMPARE
        and event.path <= 255
    )
    times = (event.issued, event.started, event.arrived, event.finished, event.waited)
    return named and event.issued > 0 and all(0 <= time <= _MOST_NS for time in times)


def _event(row: Sequence[Any]) -> Event:
    if not isinstance(row, list) or not all(type(value) is int for value in row):
        raise TypeError("an event is a row of numbers")
    event = Event._make(row)
    if min(row) < -1 or not plausible(event):
        raise TypeError("an event cannot be so")
    return event


def latest(sheets: Iterable[Sheet]) -> list[Sheet]:
    """Of each rank in each group the one that was read last."""
    found: dict[tuple[int, int], Sheet] = {}
    for sheet in sorted(sheets, key=lambda sheet: sheet.read_ns):
        found[sheet.key] = sheet
    return [found[key] for key in sorted(found)]
