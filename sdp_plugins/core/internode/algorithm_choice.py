"""Selects the plan of an operation: the algorithm with the lowest cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .. import _native
from .cost_model import Costs
from .group_context import GroupContext
from .operation import SpanningOperation
from .plan import Algorithm, Plan, factorings
from .wire_format import EXACT_NBYTES, WireFormat

_COSTS = Costs()
MIB = 2**20
SEGMENTS = tuple(MIB // 4 << shift for shift in range(7))
"""Lengths of segments in bytes, from 256 KiB to 16 MiB."""
MOST_MULTIPLIED_NBYTES = 4 * MIB
"""Largest buffer for recursive multiplying.

It needs memory for all members of a level, and one rank of a node sums alone.
"""


def plan_of(operation: SpanningOperation) -> Plan:
    """The plan of a reduction, the same on all ranks."""
    nbytes = operation.request.count * operation.itemsize
    rounds = WireFormat(operation).rounds
    return _plan(operation.context, operation.request.op, nbytes, rounds=rounds)


def explain(context: GroupContext, op: _native.Op, nbytes: int) -> str:
    """Describe how an operation on `nbytes` bytes exchanges data between nodes."""
    if op not in (_native.Op.all_reduce, _native.Op.reduce):
        return "every rank's data goes straight to the nodes that need it, once"
    rounds = context.wire_dtype is not None and nbytes > EXACT_NBYTES
    return str(_plan(context, op, nbytes, rounds=rounds))


def _plan(context: GroupContext, op: _native.Op, nbytes: int, *, rounds: bool) -> Plan:
    direct = rounds or op is _native.Op.reduce  # each further level would round once more
    algorithm = Algorithm.sharded if rounds else None
    return choose(_COSTS, context.nodes.count, nbytes, algorithm=algorithm, direct=direct)


def candidates(
    nodes: int, algorithm: Algorithm | None = None, *, direct: bool = False
) -> Iterator[Plan]:
    """Yield all plans for a number of nodes; the other arguments are those of `choose`."""
    for radices in factorings(nodes)[: 1 if direct else None]:
        if algorithm is not Algorithm.sharded:
            yield Plan(Algorithm.recursive_multiplying, radices)
        if algorithm is not Algorithm.recursive_multiplying:
            for segment in SEGMENTS:
                yield Plan(Algorithm.sharded, radices, segment)


@lru_cache(maxsize=4096)
def choose(
    costs: Costs,
    nodes: int,
    nbytes: int,
    *,
    algorithm: Algorithm | None = None,
    direct: bool = False,
) -> Plan:
    """Return the fastest plan.

    Args:
        costs: Costs of the network; equal on all ranks.
        nodes: Number of nodes, 2 or more.
        nbytes: Size of the buffer.
        algorithm: The only algorithm to consider; None: all.
        direct: Whether the plan must have one level.
    """
    if algorithm is None and nbytes > MOST_MULTIPLIED_NBYTES:
        algorithm = Algorithm.sharded
    plans = candidates(nodes, algorithm, direct=direct)
    return min(plans, key=lambda plan: costs.seconds(plan, nbytes))
