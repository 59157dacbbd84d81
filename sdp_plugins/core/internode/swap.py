"""Small reductions across nodes: the first ranks of the nodes swap the nodes' sums."""

from __future__ import annotations

from .. import _native
from .call import Call
from .format import Format
from .plan import Level, Plan, levels
from .scattered import Scattered

Op = _native.Op


class Swap:
    """One reduction by a plan that swaps.

    Args:
        call: The operation.
        plan: How.
        keep: Ranks that need the result; None: all. Others' buffers stay as they are.
    """

    def __init__(self, call: Call, plan: Plan, keep: frozenset[int] | None) -> None:
        self._call = call
        self._keep = keep
        self._form = Format(call, as_it_is=True)
        self._levels = levels(plan, call.here.node, call.request.count)
        call.hops = len(self._levels)

    def run(self) -> None:
        """Reduce in the node, among nodes, and spread the result."""
        call, here = self._call, self._call.here
        count = call.request.count
        buffer = Scattered(call.request.recvs, call.itemsize)
        flat = buffer.flat(call, "flat", 0, count)
        partial = call.scratch("partial", count * self._form.accumulator_size)
        sends = [(flat, count if index == 0 else 0) for index in range(len(here.local))]
        mine = (partial, count if here.leads else 0)
        call.step(Op.reduce_scatter, sends, [mine], accumulates=True)
        result = call.scratch("result", count * call.itemsize)
        if here.leads:
            for hop, level in enumerate(self._levels[:-1], 1):
                self._form.fold(self._partials(level, partial, hop), partial, count)
            partials = self._partials(self._levels[-1], partial, len(self._levels))
            self._form.total(partials, result, count)
        call.step(Op.broadcast, (), [(result, count)], root=0)
        if self._keep is None or here.rank in self._keep:
            buffer.write(0, count, result)

    def _partials(self, level: Level, partial: int, hop: int) -> list[int]:
        """Where the sums of all members of a level are, once they have come."""
        call = self._call
        nbytes = level.count * self._form.accumulator_size
        room = call.scratch("partials", len(level.members) * nbytes)
        partials = [room + digit * nbytes for digit in range(len(level.members))]
        partials[level.digit] = partial
        leaders = [call.here.nodes.members[node][0] for node in level.members]
        messages = [call.receive(leaders[d], partials[d], nbytes) for d in level.others]
        messages += [call.send(leaders[d], partial, nbytes) for d in level.others]
        call.wait(messages, hop=hop)
        return partials
