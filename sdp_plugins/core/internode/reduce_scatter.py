"""reduce_scatter across nodes: each node reduces the parts of each other node and sends them."""

from __future__ import annotations

from collections.abc import Iterator

from .. import _native
from .agreement import await_leader
from .gathers import NOTHING, rounds
from .operation import SpanningOperation
from .transport import Pending
from .wire_format import WireFormat

Op = _native.Op


def reduce_scatter(operation: SpanningOperation) -> None:
    """Run reduce_scatter in one hop between nodes.

    Each link carries LS(M-1) bytes per direction, where S is the size of a rank's part. On each
    node, the rank with the same local index sums a rank's part.
    """
    context, request = operation.context, operation.request
    nodes, form = context.nodes, WireFormat(operation)
    target, count = request.recvs[0]
    await_leader(operation)
    if count == 0:
        return
    nbytes = form.sums.nbytes(count)
    room = context.scratch("partials", nodes.count * nbytes)
    partials = [room + node * nbytes for node in range(nodes.count)]
    messages: list[Pending | None] = [
        operation.receive(nodes.counterpart(context.rank, node), partials[node], nbytes)
        for node in context.other_nodes
    ]
    for node in context.other_nodes:
        for number, (peer, at, length) in enumerate(_sums(operation, form, node)):
            if form.rounds:
                packed = context.scratch(f"packed{node}.{number}", form.sums.nbytes(length))
                form.pack(form.sums, packed, at, length, node << 16 | number)
                at = packed
            messages.append(operation.send(peer, at, form.sums.nbytes(length)))
    for _, at, _ in _sums(operation, form, context.node):
        partials[context.node] = at
    operation.wait(messages)
    form.total_received(partials, context.node, target, count)


def _sums(
    operation: SpanningOperation, form: WireFormat, node: int
) -> Iterator[tuple[int, int, int]]:
    """Reduce the parts of a node's ranks within this node.

    Yields:
        The rank, address and number of elements of each part that this rank sums.
    """
    context, whole = operation.context, operation.request.sends
    n_local, local_rank = len(context.local_ranks), context.local_rank
    for n, ranks in enumerate(rounds(context.nodes.members[node], n_local)):
        sends = [whole[rank] for rank in ranks] + [NOTHING] * (n_local - len(ranks))
        sums, count = sends[local_rank]
        if n_local > 1 or not form.sums_are_values:
            sums = context.scratch(f"sum{node}.{n}", count * form.accumulator_size)
            operation.step(Op.reduce_scatter, sends, [(sums, count)], accumulates=True)
        if count:
            yield ranks[local_rank], sums, count
