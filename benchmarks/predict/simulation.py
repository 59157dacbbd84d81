"""Simulates data-parallel training on up to thousands of nodes: our all_reduce, a ring, servers.

A step is a forward pass and a backward pass, which releases gradients in the reverse order of the
parameters (see ``gradients.py``). Buckets are reduced in that order, while the backward pass goes
on. A node's next step begins when it has the sum of its last bucket.

Nodes are not equally fast: each step of each takes ``compute_s * (1 + jitter * X)`` where X is
exponentially distributed with mean 1, so that ``jitter`` is the relative standard deviation. That
is how interruptions that know nothing of each other add up: they never make a step faster than it
can be, most cost little, and the longest of M grows with the logarithm of M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.predict.baselines import Ring, Servers
from benchmarks.predict.exchange import Exchange, Times
from benchmarks.predict.gradients import Release, buckets, one_by_one, releases, sizes_of
from sdp_plugins.core.internode.costs import Costs
from sdp_plugins.core.internode.plan import Plan


class Method(Protocol):
    """Reduces one bucket after the other on simulated nodes."""

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """When every node has the sum of a bucket, from when it has had its gradients."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how fast.

    Attributes:
        model: One of ``gradients.MODELS``.
        ranks_per_node: How many ranks a node has.
        compute_s: Seconds of a rank's forward and backward pass, undisturbed.
        jitter: See the module.
        steps: How many are simulated, one after the other.
        seed: Of the delays. A node has the same ones whatever the number of nodes and the method.
        local_s: Seconds of the ring's hops inside of a node; None: as between nodes.
    """

    model: str = "bert-large"
    ranks_per_node: int = 8
    compute_s: float = 0.3
    jitter: float = 0.02
    steps: int = 5
    seed: int = 0
    local_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One number of nodes.

    Attributes:
        nodes: How many.
        ours_s: Mean seconds of a step with our all_reduce.
        ring_s: With a ring over all ranks.
        servers_s: With parameter servers of whole tensors.
        plan: How our all_reduce takes the largest bucket.
        imbalance: Bytes of the busiest server over the mean of all.
    """

    nodes: int
    ours_s: float
    ring_s: float
    servers_s: float
    plan: Plan
    imbalance: float


def scales(most: int) -> list[int]:
    """Numbers of nodes of a curve: powers of two, and the most."""
    powers = [1 << bit for bit in range(1, most.bit_length())]
    return sorted({*powers, most})


def run(setting: Setting, costs: Costs, nodes: int) -> Row:
    """Simulate training on so many nodes, by every method."""
    sizes = sizes_of(setting.model)
    fused = releases(sizes, buckets(sizes))
    single = releases(sizes, one_by_one(sizes))
    ranks = setting.ranks_per_node
    servers = Servers(costs, nodes)
    for release in single:
        servers.all_reduce(np.zeros(nodes), release.nbytes)
    return Row(
        nodes,
        mean_step_s(lambda: Exchange(costs, nodes), fused, setting, nodes),
        mean_step_s(lambda: Ring(costs, nodes, ranks, setting.local_s), fused, setting, nodes),
        mean_step_s(lambda: Servers(costs, nodes), single, setting, nodes),
        Exchange(costs, nodes).plan(max(release.nbytes for release in fused)),
        servers.imbalance,
    )


def mean_step_s(
    start: Callable[[], Method], released: Sequence[Release], setting: Setting, nodes: int
) -> float:
    """Mean seconds of a step.

    Args:
        start: Makes a method with nothing on its way: no step leaves any to the next.
        released: What a step reduces.
        setting: The rest.
        nodes: How many there are.
    """
    begun = np.zeros(nodes)
    for number in range(setting.steps):
        begun = step(start(), released, begun, compute_times(setting, nodes, number))
    return float(begun.max()) / setting.steps


def compute_times(setting: Setting, nodes: int, number: int) -> Times:
    """Seconds that each node computes in a step."""
    delays = np.random.default_rng([setting.seed, number]).standard_exponential(nodes)
    return setting.compute_s * (1 + setting.jitter * delays)


def step(method: Method, released: Sequence[Release], begun: Times, compute_s: Times) -> Times:
    """When every node is done with a step.

    Args:
        method: Reduces.
        released: What, in the order of the backward pass.
        begun: When every node has begun the step.
        compute_s: How long it computes.
    """
    done = begun + compute_s
    for release in released:
        ready = begun + compute_s * release.share
        done = np.maximum(done, method.all_reduce(ready, release.nbytes))
    return done
