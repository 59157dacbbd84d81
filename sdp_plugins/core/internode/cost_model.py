"""Estimates how long a plan takes; arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Algorithm, Plan

RAMP = 1 / 16
"""Time that the first and the last segment add per hop, in stages.

Measured on 2 nodes of 1 rank to 4 nodes of 2 ranks.
"""


@dataclass(frozen=True)
class Costs:
    """Costs of a network and its nodes, in seconds.

    Groups plan with the defaults. By the formulas below, these plans take 5 % longer on average
    than plans for the network's own costs (1 to 400 Gbit/s, 2 to 1024 nodes, 1 KiB to 100 MiB), and
    at most 22 % longer up to 16 nodes. Plans for costs that each job measured were no faster
    (docs/multi-node-figures.md).

    Attributes:
        latency_s: From the post of a small message until its receiver continues.
        post_s: To post one more small message, and to receive one.
        message_s: Overhead of each message of a sharded reduction while others are in flight,
            without the time of its bytes.
        byte_s: To carry a byte over a node's link in each direction at once; all ranks of the
            node share the link.
        node_byte_s: To reduce a byte of the buffer among the ranks of a node, sum it with the
            bytes of other nodes, and gather it.
    """

    latency_s: float = 50e-6
    post_s: float = 10e-6
    message_s: float = 80e-6
    byte_s: float = 0.5e-9
    node_byte_s: float = 0.5e-9

    def seconds(self, plan: Plan, nbytes: int) -> float:
        """Seconds that a reduction of a buffer takes, after the nodes have agreed on the call."""
        nbytes = max(nbytes, 1)
        if plan.algorithm is Algorithm.recursive_multiplying:
            return (
                plan.hops * self.latency_s
                + (plan.messages - plan.hops) * self.post_s
                + plan.sent(nbytes) * self.byte_s
                + (1 + plan.messages) * nbytes * self.node_byte_s
            )
        segment = min(plan.segment_nbytes, nbytes)
        stage_s = self.stage_s(plan, segment)
        return plan.hops * self.latency_s + stage_s * (nbytes / segment + plan.hops * RAMP)

    def stage_s(self, plan: Plan, segment: float) -> float:
        """Seconds from one segment of a sharded reduction to the next.

        The ranks' work in a stage overlaps the messages in flight: those to the servers or those
        from the servers, half of the bytes.
        """
        wire_s = plan.sent(segment) * self.byte_s
        work_s = plan.messages * self.message_s + segment * self.node_byte_s
        return max(wire_s, wire_s / 2 + work_s)
