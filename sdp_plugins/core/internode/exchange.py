"""Large reductions across nodes: balanced exchange in segments, one behind the other.

The ranks of a node reduce a segment among themselves, so that lane l holds the node's sum of the
segment's l-th part. The ranks of a lane exchange that with those of the other nodes, level by level
of the plan, and collect the results the same way back; then the ranks of the node gather the lanes.
While one segment is on the wire, the next is reduced in the node and the one before is gathered;
the last segments of an operation share the wire with the first ones of the next.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from .. import _native
from .call import Call, Piece
from .format import Format
from .plan import Plan, levels, segments
from .planning import plan_of
from .scattered import Scattered
from .shards import shard
from .wire import Pending, Way

Op = _native.Op
PREPARED = 1
"""So many segments that are not launched yet are received already."""


class Reduction:
    """What the segments of one operation have in common.

    Args:
        call: The operation.
        plan: How it travels.
        keep: Ranks that need the result; None: all. Others' buffers stay as they are; the plan has
            one level then.
    """

    def __init__(self, call: Call, plan: Plan, keep: frozenset[int] | None = None) -> None:
        here = call.here
        self.call = call
        self.plan = plan
        self.form = Format(call)
        self.keeps = keep is None or here.rank in keep
        self.keeping_nodes = frozenset(
            range(here.nodes.count) if keep is None else map(here.nodes.node_of, keep)
        )
        self.node_keeps = here.node in self.keeping_nodes
        self.buffer = Scattered(call.request.recvs, call.itemsize)
        self.lanes = here.nodes.lanes
        self.exchanges = here.index < self.lanes
        call.hops = plan.hops
        self.lane = [ranks[here.index % self.lanes] for ranks in here.nodes.members]

    def segments(self) -> Iterator[Segment]:
        """All of it, piece by piece."""
        parts = segments(self.plan, self.call.request.count, self.call.itemsize)
        for begin, length in parts:
            yield Segment(self, begin, length)


class Segment:
    """One segment on its way.

    Args:
        reduction: What it is a piece of.
        begin: Its first element.
        count: How many.
    """

    def __init__(self, reduction: Reduction, begin: int, count: int) -> None:
        self.of = reduction
        self._begin, self._count = begin, count
        call, here = reduction.call, reduction.call.here
        self._lanes = [shard(count, reduction.lanes, lane) for lane in range(reduction.lanes)]
        self._first, length = self._lanes[here.index] if reduction.exchanges else (0, 0)
        self._length = length
        self._levels = levels(reduction.plan, here.node, length) if reduction.exchanges else ()
        self._itemsize = call.itemsize
        self._on_the_way: list[list[Pending | None]] = []  # by stage
        self._stage = 0
        self.slot = 0
        """Which memory it uses; no other segment on its way uses the same."""

    @property
    def done(self) -> bool:
        """Whether the result is where it belongs."""
        return self._stage > self.of.plan.hops

    def prepare(self) -> None:
        """Receive whatever will come, long before it does.

        A sender of much waits for the word that there is room; behind what goes the same way as
        that word, it would come too late for the sender's link to be busy all the time. Results
        may be received where sums are sent from: none comes before those who make it have them.
        """
        of, form = self.of, self.of.form
        self._flat = of.buffer.flat(
            of.call, f"flat{self.slot}", self._begin, self._count, copy=not of.keeps
        )
        if not of.exchanges:
            return
        if not form.narrows_results and of.node_keeps:
            self._results = self._flat + self._first * self._itemsize
        else:
            self._results = self._scratch("results", self._length, form.result_size)
        self._partials = [self._room_for(depth) for depth in range(len(self._levels))]
        depths = range(len(self._levels))
        self._on_the_way = [self._receive_partials(depth) for depth in depths]
        self._on_the_way += [self._receive_results(depth) for depth in reversed(depths)]

    def advance(self) -> None:
        """Go through the next stage: wait for what the one before has posted, and post more."""
        depth = len(self.of.plan.radices)
        if self._stage == 0:
            self._reduce_node()
        elif self.of.exchanges:
            self._wait(_way(self._stage - 1) if self._stage <= depth else Way.back)
            if self._stage < depth:
                self._fold(self._stage - 1)
            elif self._stage == depth:
                self._total()
        if self.of.exchanges and self._stage < depth:
            self._scatter(self._stage)
        elif self.of.exchanges and self._stage < 2 * depth:
            self._collect(2 * depth - 1 - self._stage)
        elif self._stage == 2 * depth:
            self._gather_node()
        self._stage += 1

    def _wait(self, way: Way) -> None:
        # Whoever has sent its part to some may be waited for by those who have not got theirs.
        self.of.call.wait(self._on_the_way[self._stage - 1], way, hop=self._stage)

    def _scratch(self, name: str, elements: int, size: int) -> int:
        return self.of.call.scratch(f"{name}{self.slot}", elements * size)

    def _room_for(self, depth: int) -> list[int]:
        """Where the members' sums of what this rank serves go; its own place is not used."""
        level, size = self._levels[depth], self.of.form.partial_size
        _, count = level.part(level.digit)
        room = self._scratch(f"partials{depth}.", len(level.members) * count, size)
        return [room + digit * count * size for digit in range(len(level.members))]

    def _receive_partials(self, depth: int) -> list[Pending | None]:
        call, level = self.of.call, self._levels[depth]
        nbytes = level.part(level.digit)[1] * self.of.form.partial_size
        return [
            call.receive(
                self.of.lane[level.members[digit]],
                self._partials[depth][digit],
                nbytes,
                _way(depth),
            )
            for digit in level.others
        ]

    def _receive_results(self, depth: int) -> list[Pending | None]:
        of, level, size = self.of, self._levels[depth], self.of.form.result_size
        messages = []
        for digit in level.others if of.node_keeps else ():
            peer, (begin, count) = of.lane[level.members[digit]], level.part(digit)
            address = self._results + begin * size
            messages.append(of.call.receive(peer, address, count * size, Way.back))
        return messages

    def _reduce_node(self) -> None:
        """Reduce among this node's ranks."""
        of, call, here, form = self.of, self.of.call, self.of.call.here, self.of.form
        at = self._flat + self._first * self._itemsize
        if len(here.local) > 1 or not form.sums_are_values:
            sends = [(self._flat + begin * self._itemsize, n) for begin, n in self._lanes]
            sends += [(self._flat, 0)] * (len(here.local) - of.lanes)
            at = self._scratch("lane", self._length, form.accumulator_size)
            call.step(Op.reduce_scatter, sends, [(at, self._length)], accumulates=True)
        packed = self._scratch("packed", self._length, form.partial_size) if form.wire else at
        self._sums = form.pack(packed, at, self._length)

    def _scatter(self, depth: int) -> None:
        """Send the other members of a level the sums that they serve."""
        of, level, size = self.of, self._levels[depth], self.of.form.partial_size
        begin, _ = level.part(level.digit)
        self._partials[depth][level.digit] = self._sums + begin * size
        for digit in level.others:
            peer, (first, count) = of.lane[level.members[digit]], level.part(digit)
            message = of.call.send(peer, self._sums + first * size, count * size, _way(depth))
            self._on_the_way[self._stage].append(message)

    def _fold(self, depth: int) -> None:
        """Sum what has come, for the next level."""
        level, form = self._levels[depth], self.of.form
        begin, count = level.part(level.digit)
        form.fold(self._partials[depth], self._sums + begin * form.partial_size, count)

    def _total(self) -> None:
        """Sum what has come at last; that is the result of what this rank serves."""
        form, level = self.of.form, self._levels[-1]
        begin, count = level.part(level.digit)
        form.total(self._partials[-1], self._results + begin * form.result_size, count)

    def _collect(self, depth: int) -> None:
        """Send the other members of a level one's results."""
        of, level, size = self.of, self._levels[depth], self.of.form.result_size
        begin, count = level.part(level.digit)
        for digit in level.others:
            if level.members[digit] in of.keeping_nodes:
                peer, address = of.lane[level.members[digit]], self._results + begin * size
                message = of.call.send(peer, address, count * size, Way.back)
                self._on_the_way[self._stage].append(message)

    def _gather_node(self) -> None:
        """Collect the lanes' results."""
        of, call, here, form = self.of, self.of.call, self.of.call.here, self.of.form
        if not of.node_keeps:
            return
        if form.narrows_results and of.exchanges:
            form.widen(self._flat + self._first * self._itemsize, self._results, self._length)
        if len(here.local) > 1:
            recvs = [(self._flat + first * self._itemsize, n) for first, n in self._lanes]
            recvs += [(self._flat, 0)] * (len(here.local) - of.lanes)
            mine: Piece = recvs[here.index]
            call.step(Op.all_gather, [mine], recvs)
        if of.keeps:
            of.buffer.write(self._begin, self._count, self._flat)


def _way(depth: int) -> Way:
    return Way.there if depth == 0 else Way.further


class Run:
    """The segments of one reduction, one stage behind the other.

    Args:
        reduction: The reduction.
        slots: Memory in use, by number.
    """

    def __init__(self, reduction: Reduction, slots: set[int]) -> None:
        self.call = reduction.call
        self.depth = reduction.plan.hops
        """Stages of a segment after the first."""
        self._segments = list(reduction.segments())
        self._slots = slots
        self._prepared = self._launched = self._stage = self._ended = 0

    @property
    def done(self) -> bool:
        """Whether all segments are."""
        return self._stage == len(self._segments) + self.depth

    @property
    def on_the_way(self) -> int:
        """Number of segments that were launched and are not done."""
        return self._launched - self._ended

    def launch(self) -> bool:
        """Send the next segment on its way, which waits for no other node; False: there is none."""
        if self._launched == len(self._segments):
            return False
        for segment in self._segments[self._prepared : self._launched + 1 + PREPARED]:
            segment.slot = next(slot for slot in itertools.count() if slot not in self._slots)
            self._slots.add(segment.slot)
            segment.prepare()
            self._prepared += 1
        self._segments[self._launched].advance()
        self._launched += 1
        return True

    def advance(self) -> None:
        """Wait for what has come of the segments in stage 1, stage 2 and so on, in this order.

        All nodes wait in the same order, however many segments they have launched by then: else
        each could wait for what another one sends only after what it waits for itself.
        """
        for behind in range(1, self.depth + 1):
            number = self._stage - behind
            if 0 <= number < len(self._segments):
                segment = self._segments[number]
                segment.advance()
                if segment.done:
                    self._slots.remove(segment.slot)
                    self._ended += 1
        self._stage += 1


class Pipeline:
    """Runs a reduction, and those behind it that all ranks have called before it has ended.

    Segments of a follower are launched while those of the reduction ahead come in, but nobody waits
    for them before that is done: a node that does not know of the follower yet still needs what is
    due to it.

    Args:
        first: The reduction to begin with.
    """

    def __init__(self, first: Reduction) -> None:
        self._slots: set[int] = set()
        self._runs = deque([Run(first, self._slots)])

    def run(self) -> None:
        """Until nobody follows."""
        while self._runs:
            ahead, last = self._runs[0], self._runs[-1]
            last.call.look_ahead()
            # Followers can get ahead of their own stages by as many segments as are coming in.
            if self._on_the_way() <= 2 * ahead.depth and not last.launch():
                self._follow(last)
            ahead.advance()
            if ahead.done:
                self._runs.popleft()
                for run in self._runs:
                    run.call.restart()
                if self._runs:
                    ahead.call.finish()

    def _on_the_way(self) -> int:
        return sum(run.on_the_way for run in self._runs)

    def _follow(self, last: Run) -> None:
        call = last.call.follower()
        if call is not None:
            self._runs.append(Run(Reduction(call, plan_of(call)), self._slots))
            self._runs[-1].launch()
