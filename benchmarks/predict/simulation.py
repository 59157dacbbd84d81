"""Simulates data-parallel training on up to thousands of nodes: our all_reduce, a ring, servers.

A step is a forward pass and a backward pass, which releases gradients in the reverse order of the
parameters (see ``gradients.py``). Buckets are reduced in that order during the backward pass. A
node's next step begins when it has the sum of its last bucket.

The speed of nodes varies: each step of each node takes ``compute_s * (1 + jitter * X)``. X is
exponentially distributed with mean 1, so ``jitter`` is the relative standard deviation. This models
independent interruptions: they never make a step faster than undisturbed, most cost little, and the
longest of M grows with the logarithm of M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.predict.baselines import Ring, Servers
from benchmarks.predict.exchange import Exchange, Times
from benchmarks.predict.gradients import Release, buckets, one_by_one, releases, sizes_of
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import Plan


class Method(Protocol):
    """Reduces one bucket after the other on simulated nodes."""

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """Return when every node has the sum of a bucket; `ready` is when it has its gradients."""


@dataclass(frozen=True)
class Setting:
    """The training to simulate.

    Attributes:
        model: One of ``gradients.MODELS``.
        ranks_per_node: Number of ranks per node.
        compute_s: Seconds of a rank's forward and backward pass, undisturbed.
        jitter: The relative standard deviation of a node's computation; see the module.
        steps: Number of simulated steps.
        seed: Seed of the delays. A node's delays do not depend on the method or the number of
            nodes.
        local_s: Seconds of the ring's hops within a node; None: as between nodes.
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
    """The results for one number of nodes.

    Attributes:
        nodes: Number of nodes.
        ours_s: Mean seconds of a step with our all_reduce.
        ring_s: Mean seconds with a ring over all ranks.
        servers_s: Mean seconds with parameter servers of whole tensors.
        plan: Our all_reduce's plan for the largest bucket.
        imbalance: Bytes of the busiest server over the mean of all servers.
    """

    nodes: int
    ours_s: float
    ring_s: float
    servers_s: float
    plan: Plan
    imbalance: float


def scales(most: int) -> list[int]:
    """Return the numbers of nodes of a curve: powers of two, and the maximum."""
    powers = [1 << bit for bit in range(1, most.bit_length())]
    return sorted({*powers, most})


def run(setting: Setting, costs: Costs, nodes: int) -> Row:
    """Simulate training on `nodes` nodes with every method."""
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
    """Return the mean seconds of a step.

    Args:
        start: Creates a method without buckets in flight; no step leaves any to the next.
        released: The gradients that a step reduces.
        setting: The training.
        nodes: Number of nodes.
    """
    begun = np.zeros(nodes)
    for number in range(setting.steps):
        begun = step(start(), released, begun, compute_times(setting, nodes, number))
    return float(begun.max()) / setting.steps


def compute_times(setting: Setting, nodes: int, number: int) -> Times:
    """Return the seconds that each node computes in a step."""
    delays = np.random.default_rng([setting.seed, number]).standard_exponential(nodes)
    return setting.compute_s * (1 + setting.jitter * delays)


def step(method: Method, released: Sequence[Release], begun: Times, compute_s: Times) -> Times:
    """Return when every node has completed a step.

    Args:
        method: The method of reduction.
        released: The gradients, in the order of the backward pass.
        begun: When every node started the step.
        compute_s: How long every node computes.
    """
    done = begun + compute_s
    for release in released:
        ready = begun + compute_s * release.share
        done = np.maximum(done, method.all_reduce(ready, release.nbytes))
    return done
