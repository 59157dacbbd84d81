"""reduce_scatter across nodes: each node reduces what is meant for another one, and sends it."""

from __future__ import annotations

from .. import _native
from .call import Call
from .format import Format
from .gathers import NOTHING, rounds
from .wire import Pending

Op = _native.Op


def reduce_scatter(call: Call) -> None:
    """One hop between nodes: each link carries LS(M-1) bytes per direction, S being a rank's part.

    The sums of a rank's part are made, at each node, by the rank with its index there.
    """
    here, request = call.here, call.request
    nodes, form = here.nodes, Format(call)
    target, count = request.recvs[0]
    call.begin()
    if count == 0:
        return
    nbytes = count * form.partial_size
    room = call.scratch("partials", nodes.count * nbytes)
    partials = [room + node * nbytes for node in range(nodes.count)]
    messages: list[Pending | None] = [
        call.receive(nodes.keeper(here.rank, node), partials[node], nbytes) for node in here.others
    ]
    for node in (*here.others, here.node):
        for n, ranks in enumerate(rounds(nodes.members[node], len(here.local))):
            sends = [request.sends[rank] for rank in ranks]
            sends += [NOTHING] * (len(here.local) - len(ranks))
            _, mine = sends[here.index]
            at = call.scratch(f"sum{node}.{n}", mine * form.accumulator_size)
            call.step(Op.reduce_scatter, sends, [(at, mine)], accumulates=True)
            if not mine:
                continue
            at = form.pack(call.scratch(f"packed{node}.{n}", mine * form.partial_size), at, mine)
            if node == here.node:
                partials[node] = at
            else:
                messages.append(call.send(ranks[here.index], at, mine * form.partial_size))
    call.wait(messages)
    if form.narrows_results:
        narrow = call.scratch("result", count * form.result_size)
        form.total(partials, narrow, count)
        form.widen(target, narrow, count)
    else:
        form.total(partials, target, count)
