"""What a plan would take, and the choice of the one that takes least: arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

from .plan import Algorithm, Plan, factorings

MIB = 2**20
SEGMENTS = tuple(MIB // 4 << shift for shift in range(7))
"""Lengths of segments in bytes, from 256 KiB to 16 MiB."""
MOST_MULTIPLIED_NBYTES = 4 * MIB
"""Recursive multiplying needs memory for all members of a level, and one rank sums for a node."""
RAMP = 1 / 16
"""What the first and the last segment add per hop, in stages; measured from 2 x 1 to 4 x 2."""
AS_GOOD = 1.05
"""Longer segments than the best are taken as long as they cost no more than this: each
message takes processor time, which training could use."""


@dataclass(frozen=True)
class Costs:
    """What the network and the nodes of a group were measured to take.

    Attributes:
        latency_s: From the post of a small message until its receiver goes on, in seconds.
        post_s: To post one more small message, and to receive one, in seconds.
        message_s: Of each message of a sharded reduction, while others are on the wire, besides
            what its bytes take, in seconds.
        byte_s: To carry a byte over a node's link while another comes in, in seconds: all ranks
            that exchange use it at once.
        node_byte_s: To reduce a byte of the buffer among the ranks of a node, sum it with those
            of other nodes, and gather it, in seconds.
    """

    latency_s: float = 50e-6
    post_s: float = 10e-6
    message_s: float = 100e-6
    byte_s: float = 1e-9
    node_byte_s: float = 0.5e-9

    def __str__(self) -> str:
        """In units that people use."""
        return (
            f"latency {self.latency_s * 1e6:.0f} us, {self.post_s * 1e6:.1f} us for each further "
            f"message, {self.message_s * 1e6:.0f} us under load; links of "
            f"{8e-9 / self.byte_s:.2f} Gbit/s, nodes reduce {1e-9 / self.node_byte_s:.2f} GB/s"
        )

    def to_json(self) -> str:
        """As a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            found = json.loads(text)
            values = {field.name: float(found[field.name]) for field in fields(cls)}
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"these are no costs of a network: {error!r}") from error
        if not all(0 < value < float("inf") for value in values.values()):
            raise ValueError(f"costs of a network must be above 0: {text.strip()}")
        return cls(**values)

    def seconds(self, plan: Plan, nbytes: int) -> float:
        """What a reduction of a buffer takes, after the nodes have agreed on what it is."""
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

        What the ranks do in a stage hides behind the messages that are on the wire meanwhile: those
        to the servers or those from them, half of the bytes.
        """
        wire_s = plan.sent(segment) * self.byte_s
        work_s = plan.messages * self.message_s + segment * self.node_byte_s
        return max(wire_s, wire_s / 2 + work_s)


def candidates(
    nodes: int, algorithm: Algorithm | None = None, *, direct: bool = False
) -> Iterator[Plan]:
    """All plans for so many nodes; `direct` ones have one level."""
    for radices in factorings(nodes)[: 1 if direct else None]:
        if algorithm is not Algorithm.sharded:
            yield Plan(Algorithm.recursive_multiplying, radices)
        if algorithm is not Algorithm.recursive_multiplying:
            for segment in SEGMENTS:
                yield Plan(Algorithm.sharded, radices, segment)


@lru_cache(maxsize=4096)
def choose(
    costs: Costs,
    nodes: int,
    nbytes: int,
    *,
    algorithm: Algorithm | None = None,
    direct: bool = False,
) -> Plan:
    """The plan that takes least, and of those that differ in no more than segments the longest.

    Args:
        costs: Equal on all ranks.
        nodes: Number of nodes, 2 or more.
        nbytes: Size of the buffer.
        algorithm: See ``candidates``.
        direct: As well.
    """
    if algorithm is None and nbytes > MOST_MULTIPLIED_NBYTES:
        algorithm = Algorithm.sharded
    plans = list(candidates(nodes, algorithm, direct=direct))
    best = min(plans, key=lambda plan: costs.seconds(plan, nbytes))
    enough_s = AS_GOOD * costs.seconds(best, nbytes)
    alike = [
        plan for plan in plans if (plan.algorithm, plan.radices) == (best.algorithm, best.radices)
    ]
    return max(
        (plan for plan in alike if costs.seconds(plan, nbytes) <= enough_s),
        key=lambda plan: plan.segment_nbytes,
    )
