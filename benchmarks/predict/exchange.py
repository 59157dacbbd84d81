"""Our all_reduce on simulated nodes: when each of them has a bucket's sum.

Nothing here knows what a hop or a segment takes: that is said by ``Costs``, the plan by ``choose``,
and who waits for whom by ``levels``, the same that a job uses.

Segments are not simulated one by one. A segment goes through hop h on a node when all members of
the level have sent theirs, and when the segment before is through:

    t[segment, h] = max(max over members of t[segment, h - 1] + hop, t[segment - 1, h] + stage)

A stage takes as long in every hop. So whoever waits for whom, the last segment is through hop h
either one hop after the level's last member was through hop h - 1 with *its* last segment, or all
stages after the hop was free. One ``max`` per hop is therefore exact for any number of segments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sdp_plugins.core.internode.costs import Costs, choose
from sdp_plugins.core.internode.headers import DIRECT, distances
from sdp_plugins.core.internode.plan import Algorithm, Plan, levels

Times = NDArray[np.float64]
"""Of every node, in seconds."""


@lru_cache(maxsize=64)
def groups(plan: Plan) -> tuple[NDArray[np.intp], ...]:
    """Of every level, the nodes that exchange with each other: one row for each such group."""
    found: list[list[tuple[int, ...]]] = [[] for _ in plan.radices]
    placed = [np.zeros(plan.nodes, np.bool_) for _ in plan.radices]
    for node in range(plan.nodes):
        if all(seen[node] for seen in placed):
            continue  # in groups that other nodes have told of
        for level, rows, seen in zip(levels(plan, node, 0), found, placed, strict=True):
            if not seen[node]:
                rows.append(level.members)
                seen[list(level.members)] = True
    return tuple(np.array(rows, np.intp) for rows in found)


def meet(times: Times, members: NDArray[np.intp]) -> Times:
    """When all members of everybody's group are there."""
    last = times[members].max(axis=1, keepdims=True)
    met = np.empty_like(times)
    met[members] = last
    return met


def agreement_s(costs: Costs, nodes: int) -> float:
    """What it takes the first ranks of the nodes to tell each other what was called.

    Up to ``DIRECT`` nodes each tells all others, beyond that one in each round.
    """
    if nodes <= DIRECT:
        return costs.seconds(Plan(Algorithm.recursive_multiplying, (nodes,)), 0)
    return len(distances(nodes)) * costs.seconds(Plan(Algorithm.recursive_multiplying, (2,)), 0)


def split_seconds(costs: Costs, plan: Plan, nbytes: int) -> tuple[float, float]:
    """Seconds that a bucket keeps a node's link busy, and what each hop adds to that.

    Together, with all hops, they are ``costs.seconds``. A swap waits for every hop, so that it is
    hops and nothing else.
    """
    busy_s = 0.0
    if plan.algorithm is Algorithm.sharded:
        segment = min(plan.segment_nbytes, nbytes)
        busy_s = costs.stage_s(plan, segment) * (nbytes / segment)
    return busy_s, (costs.seconds(plan, nbytes) - busy_s) / plan.hops


class Exchange:
    """Buckets that our all_reduce takes through the nodes, one after the other.

    With M nodes, S bytes and radices r1 ... rk: 2k hops and 2S(M-1)/M bytes over every link in each
    direction (an exchange), or k hops and S(r1 - 1 + ... + rk - 1) bytes (a swap), whichever takes
    less. Exchanges share the wire: the first segments of a bucket fill the hops that the last ones
    of the bucket before have left. A swap has the wire for itself.

    Args:
        costs: What the network and the nodes take.
        nodes: How many there are, 2 or more.
    """

    def __init__(self, costs: Costs, nodes: int) -> None:
        self.costs = costs
        self._nodes = nodes
        self._agreement_s = agreement_s(costs, nodes)
        self._free: list[Times] = [np.zeros(nodes)]
        """When the bucket ahead was reduced in the node, and through every hop of its way."""

    def plan(self, nbytes: int) -> Plan:
        """How a bucket travels: groups plan with the default costs, whatever their network."""
        return choose(Costs(), self._nodes, nbytes)

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """Send the next bucket on its way.

        Args:
            ready: When every node has its gradients.
            nbytes: How large it is.

        Returns:
            When every node has the sum.
        """
        plan = self.plan(nbytes)
        hops = groups(plan)
        if plan.algorithm is Algorithm.sharded:
            hops += hops[::-1]  # what was scattered is collected the same way back
        free = self._free_hops(plan, len(hops))
        busy_s, hop_s = split_seconds(self.costs, plan, nbytes)
        through = [np.maximum(ready + self._agreement_s, free[0]) + busy_s]
        for members, free_hop in zip(hops, free[1:], strict=True):
            through.append(np.maximum(meet(through[-1], members) + hop_s, free_hop + busy_s))
        self._free = through if plan.algorithm is Algorithm.sharded else through[-1:]
        return through[-1]

    def _free_hops(self, plan: Plan, hops: int) -> list[Times]:
        """When a bucket may be reduced in the node, and use every hop of its way.

        An exchange behind one with fewer or more hops is that far from its end, too.
        """
        if plan.algorithm is Algorithm.recursive_multiplying:
            return [self._free[-1]] * (hops + 1)
        skipped = len(self._free) - (hops + 1)
        return [self._free[max(0, skipped + hop)] for hop in range(hops + 1)]
