"""all_reduce and reduce across nodes, and the algorithm for small buffers.

In recursive multiplying the leaders exchange their nodes' sums, level by level.
"""

from __future__ import annotations

from .. import _native
from .agreement import await_leader
from .algorithm_choice import plan_of
from .operation import SpanningOperation
from .plan import Algorithm, Level, Plan, levels
from .scattered import Scattered
from .sharded_reduction import ShardedReduction
from .wire_format import WireFormat

Op = _native.Op


def all_reduce(operation: SpanningOperation) -> None:
    """Run all_reduce, or reduce: an all_reduce whose result only the root keeps."""
    plan = plan_of(operation)
    if operation.request.count == 0:
        return
    if plan.algorithm is Algorithm.sharded:
        await_leader(operation)
        ShardedReduction(operation, plan).run()
    else:
        reduce_by_recursive_multiplying(operation, plan)


def reduce_by_recursive_multiplying(operation: SpanningOperation, plan: Plan) -> None:
    """Reduce within the node, then among nodes, and broadcast the result within the node."""
    context, request = operation.context, operation.request
    count, form = request.count, WireFormat(operation)
    operation.deadlines.hops = plan.hops
    buffer = Scattered(request.recvs, operation.itemsize)
    flat = buffer.flat(operation, "flat", 0, count)
    partial = context.scratch("partial", count * form.accumulator_size)
    sends = [(flat, count if index == 0 else 0) for index in range(len(context.local_ranks))]
    mine = (partial, count if context.is_node_leader else 0)
    operation.step(Op.reduce_scatter, sends, [mine], accumulates=True)
    result = context.scratch("result", count * operation.itemsize)
    if context.is_node_leader:
        *inner, last = levels(plan, context.node, count)
        for hop, level in enumerate(inner, 1):
            form.fold(_exchange(operation, form, level, partial, hop), partial, count)
        form.total(_exchange(operation, form, last, partial, plan.hops), result, count)
    operation.step(Op.broadcast, (), [(result, count)], root=0)
    if operation.keeps_result:
        buffer.write(0, count, result)


def _exchange(
    operation: SpanningOperation, form: WireFormat, level: Level, partial: int, hop: int
) -> list[int]:
    """Exchange the sums of a level's members; returns the addresses of all of them."""
    nbytes = level.count * form.accumulator_size
    room = operation.context.scratch("partials", len(level.members) * nbytes)
    partials = [room + digit * nbytes for digit in range(len(level.members))]
    partials[level.digit] = partial
    leaders = [operation.context.nodes.members[node][0] for node in level.members]
    messages = [operation.receive(leaders[d], partials[d], nbytes) for d in level.others]
    messages += [operation.send(leaders[d], partial, nbytes) for d in level.others]
    operation.wait(messages, hop=hop)
    return partials
