"""Runs the segments of large reductions as a pipeline.

While one segment is on the wire, the next is reduced in the node and the previous one is gathered.
The last segments of an operation share the wire with the first ones of the next.
"""

from __future__ import annotations

import itertools
from collections import deque

from .planning import plan_of
from .sharded_reduction import ShardedReduction

PREPARED = 1
"""Number of segments ahead of the launched ones whose receives are posted."""


class Run:
    """The segments of one reduction, each one stage behind the one before.

    Args:
        reduction: The reduction.
        slots: Numbers of the memory slots in use; shared by all runs.
    """

    def __init__(self, reduction: ShardedReduction, slots: set[int]) -> None:
        self.operation = reduction.operation
        self.depth = reduction.plan.hops
        """Number of stages of a segment after the first."""
        self._segments = list(reduction.segments())
        self._slots = slots
        self._prepared = self._launched = self._stage = self._ended = 0

    @property
    def done(self) -> bool:
        """Whether all segments are done."""
        return self._stage == len(self._segments) + self.depth

    @property
    def on_the_way(self) -> int:
        """Number of segments that are launched and not done."""
        return self._launched - self._ended

    def launch(self) -> bool:
        """Launch the next segment, without waiting for other nodes; False: there is none."""
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
        """Advance the segments in stage 1, stage 2 and so on, in this order.

        All nodes wait in the same order, however many segments they have launched by then.
        Otherwise two nodes could each wait for a message that the other sends only after its own
        wait.
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
    """Runs a reduction, and the followers that all ranks have called before it has ended.

    Segments of a follower are launched while those of the reduction ahead arrive, but no node waits
    for them until that reduction is done: a node that does not know of the follower yet still needs
    the data of the reduction ahead.

    Args:
        first: The reduction to begin with.
    """

    def __init__(self, first: ShardedReduction) -> None:
        self._slots: set[int] = set()
        self._runs = deque([Run(first, self._slots)])

    def run(self) -> None:
        """Run until the last reduction is done and none follows."""
        while self._runs:
            ahead, last = self._runs[0], self._runs[-1]
            if last.operation.queue is not None:
                last.operation.queue.announce_next()
            # Followers may launch segments ahead of their own stages, as many as the reduction
            # ahead has in flight.
            if self._on_the_way() <= 2 * ahead.depth and not last.launch():
                self._follow(last)
            ahead.advance()
            if ahead.done:
                self._runs.popleft()
                for run in self._runs:
                    run.operation.deadlines.restart()
                if self._runs and ahead.operation.queue is not None:
                    ahead.operation.queue.finish(ahead.operation)

    def _on_the_way(self) -> int:
        return sum(run.on_the_way for run in self._runs)

    def _follow(self, last: Run) -> None:
        queue = last.operation.queue
        operation = queue.begin_next(last.operation) if queue is not None else None
        if operation is not None:
            self._runs.append(Run(ShardedReduction(operation, plan_of(operation)), self._slots))
            self._runs[-1].launch()
