"""Validates data that other processes have written about themselves."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

from sdp_plugins.core.rank_info import MOST_CHARS, Forming, RankInfo
from sdp_plugins.core.rank_names import RankNames, printable

MOST_RANKS = 1 << 20
_MOST_NS = 2**63 - 1
_KINDS = {name: kind for name, kind in get_type_hints(RankInfo).items() if name != "members"}


def rank_info_from_text(text: bytes) -> RankInfo:
    """Read what ``RankInfo.pack`` has written to a segment.

    Raises:
        ValueError: It is something else.
    """
    try:
        return rank_info_from_json(json.loads(text.partition(b"\0")[0].decode()))
    except RecursionError as error:
        raise ValueError("it does not identify a rank") from error


def rank_info_from_json(found: Any) -> RankInfo:
    """Read what ``RankInfo.to_json`` has written.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(found, dict):
        raise ValueError("it does not identify a rank")
    values = {name: checked(name, kind, found.get(name)) for name, kind in _KINDS.items()}
    info = RankInfo(members=None, **values)
    pid, _, _ = info.process.partition("@")
    is_pid = pid.isdecimal() and pid.isascii() and len(pid) <= 10
    if not is_pid or not 0 <= info.rank < info.world_size <= MOST_RANKS:
        raise ValueError(f"it claims to be rank {info.rank} of {info.world_size}")
    return info._replace(members=from_runs(found.get("members"), info.world_size))


def forming_from_text(since_ns: int, text: bytes) -> Forming | None:
    """Read what ``Forming.pack`` has written to a segment; None if it makes no sense."""
    try:
        size, members, name = text.partition(b"\0")[0].decode(errors="ignore").split(" ", 2)
        return forming_from_json([name, int(size), since_ns, json.loads(members)])
    except (ValueError, RecursionError):
        return None


def forming_from_json(found: Any) -> Forming | None:
    """Read what ``Forming.to_json`` has written; None if there was none.

    Raises:
        ValueError, TypeError: It is something else.
    """
    if found is None:
        return None
    name, size, since_ns, members = found
    name, size = checked("name", str, name), checked("world_size", int, size)
    if not (0 < size <= MOST_RANKS and 0 < checked("since_ns", int, since_ns) <= _MOST_NS):
        raise ValueError("it does not describe a group that is being made")
    return Forming(RankNames(name, size, from_runs(members, size)), since_ns)


def checked(name: str, kind: type, value: Any) -> Any:
    """Return a value if it has exactly this type: a bool is not an int.

    Raises:
        ValueError: It has another type.
    """
    if type(value) is not kind:
        raise ValueError(f"it has {name}={value!r:.40}")
    return printable(value, 2 * MOST_CHARS) if isinstance(value, str) else value


def from_runs(found: Any, world_size: int) -> tuple[int, ...] | None:
    """The ranks that ``to_runs`` has written; None if it cannot have written this."""
    if not isinstance(found, list):
        return None
    members: list[int] = []
    for run in found:
        if not (isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)):
            return None
        first, count = run
        if not 0 <= first < MOST_RANKS or not 0 < count <= world_size - len(members):
            return None
        members += range(first, first + count)
    return tuple(members) if len(members) == world_size else None
