"""Which plan an operation goes by."""

from __future__ import annotations

from .call import Call, Here
from .costs import choose
from .format import Format
from .plan import Kind, Plan

NARROW_NBYTES = 16 * 1024
"""With a wire dtype larger buffers are narrowed, and smaller ones are not, whatever was measured:
that changes the result."""


def plan_of(call: Call, *, direct: bool = False) -> Plan:
    """The plan of a reduction, the same on all ranks.

    Args:
        call: The operation.
        direct: Whether it must have one level.
    """
    nbytes = call.request.count * call.itemsize
    return _plan(call.here, nbytes, narrows=Format(call).wire is not None, direct=direct)


def explain(here: Here, op: str, nbytes: int) -> str:
    """What an operation on so many bytes does between nodes, and why."""
    if op not in ("all_reduce", "reduce"):
        return "every rank's data goes straight to the nodes that need it, once"
    narrows = here.wire_dtype is not None
    plan = _plan(here, nbytes, narrows=narrows, direct=op == "reduce")
    narrowed = narrows and nbytes > NARROW_NBYTES
    seconds = here.costs.seconds(plan, nbytes // 2 if narrowed else nbytes)
    return f"{plan}; about {seconds * 1e3:.3g} ms with {here.costs}"


def _plan(here: Here, nbytes: int, *, narrows: bool, direct: bool) -> Plan:
    kind = None
    if narrows:  # every level would round once more
        direct = True
        kind = Kind.swap if nbytes <= NARROW_NBYTES else Kind.exchange
    return choose(here.costs, here.nodes.count, nbytes, kind=kind, direct=direct)
