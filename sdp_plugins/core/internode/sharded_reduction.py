"""Large reductions across nodes: a reduce-scatter, then an all-gather, in segments.

The ranks of a node reduce a segment among themselves, so that rail l holds the node's sum of the
segment's l-th part. The ranks of a rail exchange these sums between nodes, level by level of the
plan, and collect the results through the same levels in reverse order. Then the ranks of the node
gather the results of all rails. The segments form a pipeline: while one is on the wire, the next is
reduced in the node and the previous one is gathered.
"""

from __future__ import annotations

from .. import _native
from ..wire_encoding import Encoding
from .operation import Piece, SpanningOperation
from .plan import Plan, levels, segments, shard
from .scattered import Scattered
from .transport import Pending, Stream
from .wire_format import WireFormat

Op = _native.Op
PREPARED = 1
"""Number of segments ahead of the launched ones whose receives are posted."""


class ShardedReduction:
    """One reduction (reduce: by a plan of one level), and the state that its segments share."""

    def __init__(self, operation: SpanningOperation, plan: Plan) -> None:
        context, request = operation.context, operation.request
        self.operation = operation
        self.plan = plan
        self.form = WireFormat(operation)
        self.keeping_nodes = (
            (context.nodes.node_of(request.root),)
            if request.op is Op.reduce
            else range(context.nodes.count)
        )
        """The nodes with ranks that keep the result."""
        self.node_keeps = context.node in self.keeping_nodes
        self.buffer = Scattered(request.recvs, operation.itemsize)
        self.rails = context.nodes.rails
        self.exchanges = context.local_rank < self.rails
        operation.deadlines.hops = plan.hops
        self.rail = [ranks[context.local_rank % self.rails] for ranks in context.nodes.members]

    def run(self) -> None:
        """Run all segments, each one stage behind the one before.

        All nodes wait for the segments in the same order. Otherwise two nodes could each wait for a
        message that the other sends only after its own wait.
        """
        hops = self.plan.hops
        slots = hops + 1 + PREPARED  # segments whose messages are in flight at a time
        parts = segments(self.plan, self.operation.request.count, self.operation.itemsize)
        running = [
            SegmentReduction(self, begin, length, number % slots)
            for number, (begin, length) in enumerate(parts)
        ]
        for segment in running[:PREPARED]:
            segment.prepare()
        for launched in range(len(running) + hops):
            for segment in running[launched + PREPARED : launched + PREPARED + 1]:
                segment.prepare()
            for number in range(launched, launched - hops - 1, -1):
                if 0 <= number < len(running):
                    running[number].advance()


class SegmentReduction:
    """One segment of a reduction, with the scratch memory of a slot that no other in flight has."""

    def __init__(self, reduction: ShardedReduction, begin: int, count: int, slot: int) -> None:
        self.of = reduction
        self._begin, self._count = begin, count
        operation, context = reduction.operation, reduction.operation.context
        self._rails = [shard(count, reduction.rails, rail) for rail in range(reduction.rails)]
        self._first, length = self._rails[context.local_rank] if reduction.exchanges else (0, 0)
        self._length = length
        self._levels = levels(reduction.plan, context.node, length) if reduction.exchanges else ()
        self._itemsize = operation.itemsize
        self._on_the_way: list[list[Pending | None]] = []  # by stage
        self._stage = 0
        self._slot = slot

    def prepare(self) -> None:
        """Post all receives of the segment, long before its messages arrive.

        The sender of a large message waits until the receiver is ready. The receiver's answer
        queues behind other data in its direction, and a late answer leaves the sender's link idle.
        Results may be received into the memory that sums are sent from: a result exists only after
        its server has received these sums.
        """
        of, form = self.of, self.of.form
        self._flat = of.buffer.flat(
            of.operation,
            f"flat{self._slot}",
            self._begin,
            self._count,
            copy=not of.operation.keeps_result,
        )
        if not of.exchanges:
            return
        self._mine = self._flat + self._first * self._itemsize
        if of.node_keeps and not form.results.rounds:
            self._results = self._mine
        else:
            self._results = self._scratch("results", self._wire_nbytes(form.results))
        self._partials = [self._room_for(depth) for depth in range(len(self._levels))]
        depths = range(len(self._levels))
        self._on_the_way = [self._receive_partials(depth) for depth in depths]
        self._on_the_way += [self._receive_results(depth) for depth in reversed(depths)]

    def advance(self) -> None:
        """Run the next stage: wait for the messages of the previous stage, then send more."""
        depth = len(self.of.plan.radices)
        if self._stage == 0:
            self._reduce_node()
        elif self.of.exchanges:
            self._wait(_stream(self._stage - 1) if self._stage <= depth else Stream.results)
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

    def _wait(self, stream: Stream) -> None:
        # The stage is the hop: a rank that waits in it may keep others waiting in the next one.
        self.of.operation.wait(self._on_the_way[self._stage - 1], stream, hop=self._stage)

    def _scratch(self, name: str, nbytes: int) -> int:
        return self.of.operation.context.scratch(f"{name}{self._slot}", nbytes)

    def _wire_nbytes(self, encoding: Encoding) -> int:
        """Bytes of this rail's values on the wire, in the parts of the last level."""
        return encoding.offset(self._length, len(self._levels[-1].members))

    def _room_for(self, depth: int) -> list[int]:
        """Addresses for the members' sums of this rank's part; its own address stays unused."""
        level = self._levels[depth]
        nbytes = self.of.form.sums.nbytes(level.part(level.digit)[1])
        room = self._scratch(f"partials{depth}.", len(level.members) * nbytes)
        return [room + digit * nbytes for digit in range(len(level.members))]

    def _receive_partials(self, depth: int) -> list[Pending | None]:
        operation, level = self.of.operation, self._levels[depth]
        nbytes = self.of.form.sums.nbytes(level.part(level.digit)[1])
        return [
            operation.receive(
                self.of.rail[level.members[digit]],
                self._partials[depth][digit],
                nbytes,
                _stream(depth),
            )
            for digit in level.others
        ]

    def _receive_results(self, depth: int) -> list[Pending | None]:
        of, level, results = self.of, self._levels[depth], self.of.form.results
        messages = []
        for digit in level.others if of.node_keeps else ():
            peer, (begin, count) = of.rail[level.members[digit]], level.part(digit)
            at = self._results + results.offset(begin, digit)
            messages.append(of.operation.receive(peer, at, results.nbytes(count), Stream.results))
        return messages

    def _reduce_node(self) -> None:
        """Reduce the segment among this node's ranks."""
        of, form, operation = self.of, self.of.form, self.of.operation
        context = operation.context
        if len(context.local_ranks) > 1 or not form.sums_are_values:
            sends = [(self._flat + begin * self._itemsize, n) for begin, n in self._rails]
            sends += [(self._flat, 0)] * (len(context.local_ranks) - of.rails)
            self._sums = self._scratch("rail", self._length * form.accumulator_size)
            step = [(self._sums, self._length)]
            operation.step(Op.reduce_scatter, sends, step, accumulates=True)
        elif of.exchanges:
            self._sums = self._mine

    def _scatter(self, depth: int) -> None:
        """Send each other member of a level the sums of the part that it reduces."""
        of, level, sums = self.of, self._levels[depth], self.of.form.sums
        begin, _ = level.part(level.digit)
        self._partials[depth][level.digit] = self._accumulator(begin)
        packed = self._scratch("packed", self._wire_nbytes(sums)) if sums.rounds else self._sums
        for digit in level.others:
            peer, (first, count) = of.rail[level.members[digit]], level.part(digit)
            at = packed + sums.offset(first, digit)
            if sums.rounds:
                part = self._begin + self._first + first
                of.form.pack(sums, at, self._accumulator(first), count, part)
            message = of.operation.send(peer, at, sums.nbytes(count), _stream(depth))
            self._on_the_way[self._stage].append(message)

    def _accumulator(self, index: int) -> int:
        return self._sums + index * self.of.form.accumulator_size

    def _fold(self, depth: int) -> None:
        """Add the received sums, for the next level."""
        level = self._levels[depth]
        begin, count = level.part(level.digit)
        self.of.form.fold(self._partials[depth], self._accumulator(begin), count)

    def _total(self) -> None:
        """Add the sums of the last level: the result of the part that this rank reduces."""
        form, level = self.of.form, self._levels[-1]
        begin, count = level.part(level.digit)
        partials = self._partials[-1]
        target = self._results + form.results.offset(begin, level.digit)
        if not form.results.rounds:
            form.total_received(partials, level.digit, target, count)
            return
        total = partials[level.digit]
        form.total_received(partials, level.digit, total, count)
        form.pack(form.results, target, total, count, self._begin + self._first + begin)

    def _collect(self, depth: int) -> None:
        """Send this rank's results to the other members of a level."""
        of, level, results = self.of, self._levels[depth], self.of.form.results
        begin, count = level.part(level.digit)
        at = self._results + results.offset(begin, level.digit)
        for digit in level.others:
            if level.members[digit] in of.keeping_nodes:
                peer = of.rail[level.members[digit]]
                message = of.operation.send(peer, at, results.nbytes(count), Stream.results)
                self._on_the_way[self._stage].append(message)

    def _gather_node(self) -> None:
        """Gather the results of all rails within the node."""
        of, form, operation = self.of, self.of.form, self.of.operation
        context = operation.context
        if not of.node_keeps:
            return
        if form.results.rounds and of.exchanges:
            self._widen_results()
        if len(context.local_ranks) > 1:
            recvs = [(self._flat + first * self._itemsize, n) for first, n in self._rails]
            recvs += [(self._flat, 0)] * (len(context.local_ranks) - of.rails)
            mine: Piece = recvs[context.local_rank]
            operation.step(Op.all_gather, [mine], recvs)
        if operation.keeps_result:
            of.buffer.write(self._begin, self._count, self._flat)

    def _widen_results(self) -> None:
        """Convert all results of this rail back, this node's own too: all nodes get the same."""
        results, level = self.of.form.results, self._levels[-1]
        for digit in range(len(level.members)):
            begin, count = level.part(digit)
            target = self._mine + begin * self._itemsize
            results.unpack(target, self._results + results.offset(begin, digit), count)


def _stream(depth: int) -> Stream:
    return Stream.data if depth == 0 else Stream.inner_levels
