"""Measures what a group's network and nodes take, once per process and network."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from .. import _native
from .agreement import await_leader
from .costs import MIB, Costs
from .operation import Operation
from .pipeline import Pipeline
from .plan import Algorithm, Plan
from .recursive_multiplying import RecursiveMultiplying
from .sharded_reduction import ShardedReduction

ROUNDS = 9
BULK_ROUNDS = 4
BURST = 16
FIRST_NBYTES, MOST_NBYTES = MIB // 4, 16 * MIB
ENOUGH_S = 0.02
"""Long enough for what leaves a node's queues at once not to count."""
NODE_NBYTES = MIB
SEGMENT_NBYTES, SEGMENTS, LONG_ENOUGH_S = MIB // 4, (4, 24), 0.1
"""So small that it is not the bytes which take the time; the first ones fill queues, but slow links
must not take seconds."""

Op = _native.Op
_known: dict[str, Costs] = {}


def known(network: str, path: str | None) -> Costs | None:
    """What has been measured before in this process, or stands in a file.

    Args:
        network: Name of the network.
        path: Of the file, which need not be there, or be of this network.

    Raises:
        ValueError: The file holds something else, or cannot be read.
    """
    if network not in _known and path and os.path.exists(path):
        try:
            text = Path(path).read_text()
            costs = Costs.from_json(text)
            if json.loads(text).get("network", network) == network:
                _known[network] = costs
        except (OSError, ValueError) as error:
            raise ValueError(f"SDP_CALIBRATION={path}: {error}") from error
    return _known.get(network)


def remember(network: str, costs: Costs, path: str | None) -> None:
    """Keep what was measured, in a file, too, if there is a path."""
    _known[network] = costs
    if path and not os.path.exists(path):
        draft = Path(f"{path}.{secrets.token_hex(8)}")
        try:
            draft.write_text(json.dumps({"network": network, **asdict(costs)}) + "\n")
            draft.replace(path)
        except OSError as error:  # the job can do without
            text = f"SDP_CALIBRATION={path} cannot be written: {error.strerror}"
            warnings.warn(text, stacklevel=2)


def calibrate(operation: Operation) -> None:
    """Measure; leaves the same costs on all ranks, in ``GroupContext.costs``.

    Most of its time goes into the bandwidth, messages to the next node and from the one before, on
    all rails at once, and into sharded reductions of small segments: 0.4 s at 1 Gbit/s.

    Args:
        operation: An all_reduce with max of four float64 of any value, which it changes.
    """
    await_leader(operation)
    bench = _Bench(operation)
    bench.ring(ROUNDS, 8)  # connections are made
    latency_s = bench.ring(ROUNDS, 8)
    post_s = max(bench.ring(ROUNDS, 8, BURST) - latency_s, 1e-7) / (BURST - 1)
    latency_s, post_s = bench.agree(latency_s, post_s)
    nbytes, byte_s = FIRST_NBYTES, 0.0
    while True:
        share = max(nbytes // bench.rails, 8)
        took_s = bench.slowest(partial(bench.ring, 1, share), BULK_ROUNDS)
        byte_s = max(took_s - latency_s, 1e-9) / (share * bench.rails)
        if took_s > ENOUGH_S or nbytes >= MOST_NBYTES:
            break
        nbytes *= 4
    (node_byte_s,) = bench.agree(max(bench.node(), 1e-9) / NODE_NBYTES)
    plan = bench.plan
    wire_s = plan.sent(SEGMENT_NBYTES) * byte_s
    segments = int(min(max(LONG_ENOUGH_S / wire_s, SEGMENTS[0]), SEGMENTS[1]))
    stage_s = bench.slowest(partial(bench.sharded, segments), 2) / segments
    work_s = stage_s - wire_s / 2 - SEGMENT_NBYTES * node_byte_s
    message_s = max(work_s / plan.messages, post_s)
    operation.context.costs = Costs(latency_s, post_s, message_s, byte_s, node_byte_s)
    operation.context.trim(0)


class _Bench:
    """What is timed."""

    def __init__(self, operation: Operation) -> None:
        context = operation.context
        self._operation = operation
        self.rails = context.nodes.rails
        self._exchanges = context.local_rank < self.rails
        rail = context.local_rank % self.rails
        self._next = context.nodes.members[context.other_nodes[0]][rail]
        self._previous = context.nodes.members[context.other_nodes[-1]][rail]
        ((address, count),) = operation.request.recvs
        self._values = np.frombuffer(memoryview((ctypes.c_double * count).from_address(address)))
        self._agreeing = RecursiveMultiplying(
            operation, Plan(Algorithm.recursive_multiplying, (context.nodes.count,)), None
        )
        self.plan = Plan(Algorithm.sharded, (context.nodes.count,), SEGMENT_NBYTES)

    def ring(self, rounds: int, nbytes: int, messages: int = 1) -> float:
        """Seconds of the best round: all rails send to the next node, and receive."""
        if not self._exchanges:
            return 0.0
        operation = self._operation
        there, back = (
            operation.context.scratch("ring", nbytes),
            operation.context.scratch("ring back", messages * nbytes),
        )

        def once() -> None:
            pending = [
                operation.receive(self._previous, back + n * nbytes, nbytes)
                for n in range(messages)
            ]
            operation.wait(
                pending + [operation.send(self._next, there, nbytes) for _ in range(messages)]
            )

        return _best_of(rounds, once)

    def node(self) -> float:
        """Seconds that a segment takes within the node."""
        operation, size = self._operation, NODE_NBYTES // 8
        ranks = len(operation.context.local_ranks)
        parts = [size // self.rails] * self.rails + [0] * (ranks - self.rails)
        segment = operation.context.scratch("segment", NODE_NBYTES)
        sums = operation.context.scratch("sums", NODE_NBYTES)
        pieces = [(segment, count) for count in parts]
        mine = parts[operation.context.local_rank]
        request = operation.request

        def once() -> None:
            if ranks > 1:
                operation.step(Op.reduce_scatter, pieces, [(sums, mine)], accumulates=True)
            half = mine // 2
            halves = [sums, sums + 8 * half]
            _native.combine(request.dtype, request.reduce_op, halves, sums, half, 0, True, True)
            if ranks > 1:
                operation.step(Op.all_gather, [(segment, mine)], pieces)

        return _best_of(ROUNDS, once)

    def sharded(self, segments: int) -> float:
        """Seconds of a sharded reduction in so many small segments."""
        operation, nbytes = self._operation, segments * SEGMENT_NBYTES
        buffer = (operation.context.scratch("buffer", nbytes), nbytes // operation.itemsize)
        request = replace(operation.request, recvs=(buffer,))

        def once() -> None:
            part = Operation(operation.context, request, operation.seq)
            try:
                Pipeline(ShardedReduction(part, self.plan)).run()
            except BaseException:
                part.abandon()
                raise
            finally:
                part.end()

        return _best_of(1, once)  # all wait for all in it

    def slowest(self, measure: Callable[[], float], rounds: int) -> float:
        """What the slowest rank takes, in the best of some rounds, for which all start together.

        Of a rank that starts late, what it receives may be there already.
        """
        return min(self.agree(measure())[0] for _ in range(rounds))

    def agree(self, *seconds: float) -> tuple[float, ...]:
        """The slowest rank's; also a barrier."""
        self._values[:] = 0
        self._values[: len(seconds)] = seconds
        self._agreeing.run()
        return tuple(self._values[: len(seconds)].tolist())


def _best_of(rounds: int, function: Callable[[], None]) -> float:
    """What it takes where nothing comes between: every rank of a job has just been started."""
    best_s = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s
