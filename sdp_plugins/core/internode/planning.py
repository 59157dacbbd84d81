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


def plan_of(operation: Operation, *, direct: bool = False) -> Plan:
    """The plan of a reduction, the same on all ranks.

    Args:
        operation: The operation.
        direct: Whether the plan must have one level.
    """
    nbytes = operation.request.count * operation.itemsize
    return _plan(
        operation.context, nbytes, narrows=WireFormat(operation).wire is not None, direct=direct
    )


def explain(context: GroupContext, op: _native.Op, nbytes: int) -> str:
    """Describe how an operation on `nbytes` bytes exchanges data between nodes."""
    if op not in (_native.Op.all_reduce, _native.Op.reduce):
        return "every rank's data goes straight to the nodes that need it, once"
    narrows = context.wire_dtype is not None
    return str(_plan(context, nbytes, narrows=narrows, direct=op is _native.Op.reduce))


def _plan(context: GroupContext, nbytes: int, *, narrows: bool, direct: bool) -> Plan:
    algorithm = None
    if narrows:  # each further level would round once more
        direct = True
        algorithm = (
            Algorithm.recursive_multiplying if nbytes <= NARROW_NBYTES else Algorithm.sharded
        )
    return choose(_COSTS, context.nodes.count, nbytes, algorithm=algorithm, direct=direct)
