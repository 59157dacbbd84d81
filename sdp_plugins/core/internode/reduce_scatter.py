"""reduce_scatter across nodes: each node reduces what is meant for another one, and sends it."""

from __future__ import annotations

from .. import _native
from .agreement import await_leader
from .format import Format
from .gathers import NOTHING, rounds
from .operation import Operation
from .wire import Pending

Op = _native.Op


def reduce_scatter(operation: Operation) -> None:
    """One hop between nodes: each link carries LS(M-1) bytes per direction, S being a rank's part.

    The sums of a rank's part are made, at each node, by the rank with its index there.
    """
    context, request = operation.context, operation.request
    nodes, form = context.nodes, Format(operation)
    target, count = request.recvs[0]
    await_leader(operation)
    if count == 0:
        return
    nbytes = count * form.partial_size
    room = operation.context.scratch("partials", nodes.count * nbytes)
    partials = [room + node * nbytes for node in range(nodes.count)]
    messages: list[Pending | None] = [
        operation.receive(nodes.counterpart(context.rank, node), partials[node], nbytes)
        for node in context.other_nodes
    ]
    for node in (*context.other_nodes, context.node):
        for n, ranks in enumerate(rounds(nodes.members[node], len(context.local_ranks))):
            sends = [request.sends[rank] for rank in ranks]
            sends += [NOTHING] * (len(context.local_ranks) - len(ranks))
            _, mine = sends[context.local_rank]
            at = operation.context.scratch(f"sum{node}.{n}", mine * form.accumulator_size)
            operation.step(Op.reduce_scatter, sends, [(at, mine)], accumulates=True)
            if not mine:
                continue
            at = form.pack(
                operation.context.scratch(f"packed{node}.{n}", mine * form.partial_size), at, mine
            )
            if node == context.node:
                partials[node] = at
            else:
                messages.append(
                    operation.send(ranks[context.local_rank], at, mine * form.partial_size)
                )
    operation.wait(messages)
    if form.narrows_results:
        narrow = operation.context.scratch("result", count * form.result_size)
        form.total(partials, narrow, count)
        form.widen(target, narrow, count)
    else:
        form.total(partials, target, count)
