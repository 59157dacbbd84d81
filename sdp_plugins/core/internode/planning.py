"""Selects the plan of an operation."""

from __future__ import annotations

from .. import _native
from .context import GroupContext
from .costs import Costs, choose
from .operation import Operation
from .plan import Algorithm, Plan
from .wire_format import WireFormat

_COSTS = Costs()
NARROW_NBYTES = 16 * 1024
"""Largest buffer that is not narrowed with a wire dtype.

The limit is fixed and does not depend on costs, because narrowing changes the result.
"""


def plan_of(operation: Operation) -> Plan:
    """The plan of a reduction, the same on all ranks."""
    nbytes = operation.request.count * operation.itemsize
    narrows = WireFormat(operation).wire is not None
    return _plan(operation.context, operation.request.op, nbytes, narrows=narrows)


def explain(context: GroupContext, op: _native.Op, nbytes: int) -> str:
    """Describe how an operation on `nbytes` bytes exchanges data between nodes."""
    if op not in (_native.Op.all_reduce, _native.Op.reduce):
        return "every rank's data goes straight to the nodes that need it, once"
    return str(_plan(context, op, nbytes, narrows=context.wire_dtype is not None))


def _plan(context: GroupContext, op: _native.Op, nbytes: int, *, narrows: bool) -> Plan:
    direct = narrows or op is _native.Op.reduce  # each further level would round once more
    algorithm = None
    if narrows:
        algorithm = (
            Algorithm.recursive_multiplying if nbytes <= NARROW_NBYTES else Algorithm.sharded
        )
    return choose(_COSTS, context.nodes.count, nbytes, algorithm=algorithm, direct=direct)
