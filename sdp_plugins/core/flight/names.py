"""Operations, ranks and times in words, as the errors write them."""

from __future__ import annotations

from .. import _native
from ..trace.events import Event
from .about import About

_ROOTED = {_native.Op[name].value for name in ("reduce", "broadcast", "gather", "scatter")}


def named(event: Event, about: About) -> str:
    """Such as ``all_reduce #1042 float32[25] sum``."""
    parts = [f"{event.name} #{event.seq}"]
    if event.op != _native.Op.barrier.value:
        parts.append(f"{_native.DType(event.dtype).name}[{event.elems}]")
    if _native.reduces(_native.Op(event.op)):
        parts.append(_native.ReduceOp(event.reduce_op).name)
    if event.op in _ROOTED:
        parts.append(f"root {about.shown(event.peer)}")
    if event.between_two:
        parts.append(_peer(event, about))
    return " ".join(parts)


def _peer(event: Event, about: About) -> str:
    towards = "to" if event.op == _native.Op.send.value else "from"
    who = "any rank" if event.peer < 0 else f"rank {about.shown(event.peer)}"
    return f"{towards} {who} tag {event.tag}"


def ranks(found: tuple[int, ...], about: About) -> str:
    """Ranks of a group, by their numbers in the job where these are known."""
    return about.names.list(found)


def seconds(nanoseconds: int) -> str:
    """A duration."""
    if nanoseconds < 10**9:
        return f"{max(0, nanoseconds) / 10**6:.1f} ms"
    return f"{nanoseconds / 10**9:.1f} s"
