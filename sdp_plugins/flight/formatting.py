"""How reports write operations and durations: as error messages do."""

from __future__ import annotations

from sdp_plugins.core import _native
from sdp_plugins.core.rank_info import RankInfo
from sdp_plugins.core.trace_event import TraceEvent

_ROOTED = {_native.Op[name].value for name in ("reduce", "broadcast", "gather", "scatter")}


def format_op(event: TraceEvent, info: RankInfo) -> str:
    """An operation, such as ``all_reduce #1042 float32[25] sum``."""
    parts = [f"{event.name} #{event.seq}"]
    if event.op != _native.Op.barrier.value:
        parts.append(f"{_native.DType(event.dtype).name}[{event.elems}]")
    if _native.reduces(_native.Op(event.op)):
        parts.append(_native.ReduceOp(event.reduce_op).name)
    if event.op in _ROOTED:
        parts.append(f"root {info.global_rank_of(event.peer)}")
    if event.between_two:
        parts.append(_peer(event, info))
    return " ".join(parts)


def _peer(event: TraceEvent, info: RankInfo) -> str:
    towards = "to" if event.op == _native.Op.send.value else "from"
    peer = "any rank" if event.peer < 0 else f"rank {info.global_rank_of(event.peer)}"
    return f"{towards} {peer} tag {event.tag}"


def format_duration(nanoseconds: int) -> str:
    """A duration in milliseconds or seconds."""
    if nanoseconds < 10**9:
        return f"{max(0, nanoseconds) / 10**6:.1f} ms"
    return f"{nanoseconds / 10**9:.1f} s"
