"""Small reductions across nodes: the leaders exchange their nodes' sums, level by level."""

from __future__ import annotations

from .. import _native
from .operation import Operation
from .plan import Level, Plan, levels
from .scattered import Scattered
from .wire_format import WireFormat

Op = _native.Op


class RecursiveMultiplying:
    """One reduction by recursive multiplying.

    Args:
        operation: The operation.
        plan: The plan.
    """

    def __init__(self, operation: Operation, plan: Plan) -> None:
        self._operation = operation
        self._form = WireFormat(operation, as_it_is=True)
        self._levels = levels(plan, operation.context.node, operation.request.count)
        operation.deadlines.hops = len(self._levels)

    def run(self) -> None:
        """Reduce within the node, then among nodes, and broadcast the result within the node."""
        operation, context = self._operation, self._operation.context
        count = operation.request.count
        buffer = Scattered(operation.request.recvs, operation.itemsize)
        flat = buffer.flat(operation, "flat", 0, count)
        partial = operation.context.scratch("partial", count * self._form.accumulator_size)
        sends = [(flat, count if index == 0 else 0) for index in range(len(context.local_ranks))]
        mine = (partial, count if context.is_node_leader else 0)
        operation.step(Op.reduce_scatter, sends, [mine], accumulates=True)
        result = operation.context.scratch("result", count * operation.itemsize)
        if context.is_node_leader:
            for hop, level in enumerate(self._levels[:-1], 1):
                self._form.fold(self._partials(level, partial, hop), partial, count)
            partials = self._partials(self._levels[-1], partial, len(self._levels))
            self._form.total(partials, result, count)
        operation.step(Op.broadcast, (), [(result, count)], root=0)
        if operation.keeps_result:
            buffer.write(0, count, result)

    def _partials(self, level: Level, partial: int, hop: int) -> list[int]:
        """Exchange the sums of a level's members; returns the addresses of all of them."""
        operation = self._operation
        nbytes = level.count * self._form.accumulator_size
        room = operation.context.scratch("partials", len(level.members) * nbytes)
        partials = [room + digit * nbytes for digit in range(len(level.members))]
        partials[level.digit] = partial
        leaders = [operation.context.nodes.members[node][0] for node in level.members]
        messages = [operation.receive(leaders[d], partials[d], nbytes) for d in level.others]
        messages += [operation.send(leaders[d], partial, nbytes) for d in level.others]
        operation.wait(messages, hop=hop)
        return partials
