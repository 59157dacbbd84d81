"""all_reduce and reduce across nodes.

S: bytes of a buffer, M: nodes, L: ranks of the smallest node (the lanes).

Large buffers go in segments. The ranks of a node reduce a segment among themselves, so that lane l
holds the node's sum of the segment's l-th part; the M ranks of a lane cut that into M parts again
and exchange directly, each being the server of one part, as in SMDDP's balanced fusion buffers: two
hops, 2S(M-1)/M bytes over every node's link in each direction, equally many for every server. Then
the node gathers. While a segment is on the wire, later ones are reduced and earlier ones gathered.

Small buffers go to the first rank of each node, which swaps them with all others and reduces all:
one hop, S(M-1) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import _native
from ..nodes import Nodes
from .call import Call, Piece
from .format import Format
from .scattered import Scattered
from .shards import shard
from .wire import Pending

SMALL_NBYTES = 16 * 1024
SEGMENT_NBYTES = 2 * 2**20
AHEAD = 1
"""Segments that are on their way to the servers, and as many on their way back."""

Op = _native.Op


def all_reduce(call: Call, keep: frozenset[int] | None = None) -> None:
    """Run all_reduce.

    Args:
        call: The operation.
        keep: Ranks that need the result; None: all. Others' buffers stay as they are.
    """
    large = call.request.count * call.itemsize > SMALL_NBYTES
    call.begin(gate=large)
    if call.request.count == 0:
        return
    if large:
        _Pipeline(call, keep).run()
    else:
        _Small(call, keep).run()


def reduce(call: Call) -> None:
    """Run reduce: all_reduce whose result only the root keeps."""
    all_reduce(call, frozenset({call.request.root}))


def describe(op: str, nbytes: int, nodes: Nodes) -> str:
    """What an operation on so many bytes does between nodes."""
    if op not in ("all_reduce", "reduce"):
        return "every rank's data goes straight to the nodes that need it, once"
    if nbytes <= SMALL_NBYTES:
        return "the first ranks of the nodes swap the nodes' sums: 1 hop"
    return (
        f"{nodes.lanes} ranks of each exchange segments of {SEGMENT_NBYTES >> 20} MiB directly: "
        "2 hops"
    )


class _Small:
    """One hop among the first ranks of the nodes."""

    def __init__(self, call: Call, keep: frozenset[int] | None) -> None:
        self.call = call
        self.keep = keep
        self.form = Format(call)

    def run(self) -> None:
        call, here, form = self.call, self.call.here, self.form
        count = call.request.count
        buffer = Scattered(call.request.recvs, call.itemsize)
        flat = buffer.flat(call, "flat", 0, count)
        partial = call.scratch("partial", count * form.accumulator_size)
        sends = [(flat, count if index == 0 else 0) for index in range(len(here.local))]
        call.step(
            Op.reduce_scatter, sends, [(partial, count if here.leads else 0)], accumulates=True
        )
        result = call.scratch("result", count * call.itemsize)
        if here.leads:
            self._swap(partial, result, count)
        call.step(Op.broadcast, (), [(result, count)], root=0)
        if self.keep is None or here.rank in self.keep:
            buffer.write(0, count, result)

    def _swap(self, partial: int, result: int, count: int) -> None:
        call, here, size = self.call, self.call.here, self.form.accumulator_size
        nbytes = count * size
        room = call.scratch("partials", here.nodes.count * nbytes)
        partials = [room + node * nbytes for node in range(here.nodes.count)]
        partials[here.node] = partial
        leaders = [ranks[0] for ranks in here.nodes.members]
        messages = [call.receive(leaders[node], partials[node], nbytes) for node in here.others]
        messages += [call.send(leaders[node], partial, nbytes) for node in here.others]
        call.wait(messages)
        form = self.form
        _native.combine(form.dtype, form.op, partials, result, count, form.world_size, True)


@dataclass
class _Segment:
    """One segment on its way."""

    begin: int
    count: int
    lane: tuple[int, int] = (0, 0)
    partials: list[int] = field(default_factory=list)
    to_servers: list[Pending | None] = field(default_factory=list)
    from_servers: list[Pending | None] = field(default_factory=list)
    result: int = 0
    flat: int = 0


class _Pipeline:
    """Segments, each in one of three stages."""

    def __init__(self, call: Call, keep: frozenset[int] | None) -> None:
        here = call.here
        self.call = call
        self.form = Format(call)
        self.keeps = keep is None or here.rank in keep
        self.keeping_nodes = frozenset(
            range(here.nodes.count) if keep is None else map(here.nodes.node_of, keep)
        )
        self.buffer = Scattered(call.request.recvs, call.itemsize)
        self.lanes = here.nodes.lanes
        self.exchanges = here.index < self.lanes
        self.peers = [ranks[here.index % self.lanes] for ranks in here.nodes.members]
        self.slots = 2 * AHEAD + 1

    def run(self) -> None:
        total = self.call.request.count
        length = max(1, SEGMENT_NBYTES // self.call.itemsize)
        segments = [
            _Segment(begin, min(length, total - begin)) for begin in range(0, total, length)
        ]
        for stage in range(len(segments) + 2 * AHEAD):
            if stage < len(segments):
                self._reduce_node(segments[stage], stage % self.slots)
            if 0 <= stage - AHEAD < len(segments):
                self._serve(segments[stage - AHEAD], (stage - AHEAD) % self.slots)
            if stage >= 2 * AHEAD:
                self._gather_node(segments[stage - 2 * AHEAD])

    def _reduce_node(self, segment: _Segment, slot: int) -> None:
        """Reduce among this node's ranks, and send the servers their parts."""
        call, here, form = self.call, self.call.here, self.form
        segment.flat = self.buffer.flat(
            call, f"flat{slot}", segment.begin, segment.count, copy=not self.keeps
        )
        lanes = [shard(segment.count, self.lanes, lane) for lane in range(self.lanes)]
        sends = [(segment.flat + begin * call.itemsize, count) for begin, count in lanes]
        sends += [(segment.flat, 0)] * (len(here.local) - self.lanes)
        segment.lane = lanes[here.index] if self.exchanges else (0, 0)
        begin, count = segment.lane
        at = segment.flat + begin * call.itemsize
        if len(here.local) > 1 or not form.sums_are_values:
            at = call.scratch(f"lane{slot}", count * form.accumulator_size)
            call.step(Op.reduce_scatter, sends, [(at, count)], accumulates=True)
        if not self.exchanges:
            return
        at = form.pack(call.scratch(f"packed{slot}", count * form.partial_size), at, count)
        size, nodes = form.partial_size, here.nodes.count
        room = call.scratch(f"partials{slot}", nodes * shard(count, nodes, 0)[1] * size)
        own = shard(count, nodes, here.node)
        segment.partials = [room + node * own[1] * size for node in range(nodes)]
        segment.partials[here.node] = at + own[0] * size
        for node in here.others:
            segment.to_servers.append(
                call.receive(self.peers[node], segment.partials[node], own[1] * size)
            )
        for node in here.others:
            first, n = shard(count, nodes, node)
            segment.to_servers.append(call.send(self.peers[node], at + first * size, n * size))

    def _serve(self, segment: _Segment, slot: int) -> None:
        """Sum what the others sent, and send them the result."""
        if not self.exchanges:
            return
        call, here, form = self.call, self.call.here, self.form
        call.wait(segment.to_servers)
        begin, count = segment.lane
        size, nodes = form.result_size, here.nodes.count
        if not form.narrows_results and here.node in self.keeping_nodes:
            segment.result = segment.flat + begin * call.itemsize
        else:
            segment.result = call.scratch(f"results{slot}", count * size)
        first, n = shard(count, nodes, here.node)
        mine = segment.result + first * size
        if n:
            form.combine(segment.partials, mine, n)
        for node in here.others:
            first, length = shard(count, nodes, node)
            if here.node in self.keeping_nodes:
                address = segment.result + first * size
                segment.from_servers.append(call.receive(self.peers[node], address, length * size))
            if node in self.keeping_nodes:
                segment.from_servers.append(call.send(self.peers[node], mine, n * size))

    def _gather_node(self, segment: _Segment) -> None:
        """Collect the lanes' results."""
        call, here, form = self.call, self.call.here, self.form
        call.wait(segment.from_servers)
        if here.node not in self.keeping_nodes:
            return
        begin, count = segment.lane
        if form.narrows_results and self.exchanges:
            target = segment.flat + begin * call.itemsize
            form.widen(target, segment.result, count)
        if len(here.local) > 1:
            lanes = [shard(segment.count, self.lanes, lane) for lane in range(self.lanes)]
            recvs = [(segment.flat + first * call.itemsize, n) for first, n in lanes]
            recvs += [(segment.flat, 0)] * (len(here.local) - self.lanes)
            mine: Piece = recvs[here.index]
            call.step(Op.all_gather, [mine], recvs)
        if self.keeps:
            self.buffer.write(segment.begin, segment.count, segment.flat)
