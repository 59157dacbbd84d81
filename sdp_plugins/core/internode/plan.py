"""How a reduction travels among nodes: arithmetic, without a network.

The number of nodes M is written as a product of radices r1 r2 ... rk, and a node's index in these
radices, lowest digit first. At level i the nodes that differ in digit i alone exchange with each
other directly. So radices (M,) are the direct exchange of SMDDP's balanced fusion buffers, (2, 2,
..., 2) are recursive halving and doubling, and everything in between trades hops for messages
(Ruefenacht, Bull and Booth, 2017, call it recursive multiplying). For a buffer of S bytes:

- ``sharded``: a reduce-scatter, whose every level divides what a node holds by its radix, and then
  an all-gather along the same levels: 2k hops, 2S(M-1)/M bytes over every link in each direction
  whatever the radices.
- ``recursive_multiplying``: every level exchanges the whole buffer: k hops,
  S(r1 - 1 + ... + rk - 1) bytes.

All radices but the last are powers of two. The sum then follows the one tree over all nodes (see
``nodes.py``), so every plan gives the same bits, and a choice by measured speed cannot change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import prod

MOST_LEADING_BITS = 4
"""Leading radices are at most 16; a last one is whatever is left."""


class Algorithm(Enum):
    """What nodes send each other."""

    recursive_multiplying = "recursive_multiplying"
    sharded = "sharded"


@dataclass(frozen=True)
class Plan:
    """How a reduction travels.

    Attributes:
        algorithm: See the module.
        radices: Their product is the number of nodes.
        segment_nbytes: A sharded reduction goes in segments of so many bytes of the buffer.
    """

    algorithm: Algorithm
    radices: tuple[int, ...]
    segment_nbytes: int = 0

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return prod(self.radices)

    @property
    def hops(self) -> int:
        """Messages one after the other."""
        return len(self.radices) * (1 if self.algorithm is Algorithm.recursive_multiplying else 2)

    @property
    def messages(self) -> int:
        """How many a rank sends for each segment, and receives."""
        once = sum(radix - 1 for radix in self.radices)
        return once if self.algorithm is Algorithm.recursive_multiplying else 2 * once

    def sent(self, size: float) -> float:
        """How much a node sends of a buffer of this size, and receives."""
        if self.algorithm is Algorithm.recursive_multiplying:
            return self.messages * size
        return 2 * size * (self.nodes - 1) / self.nodes

    def __str__(self) -> str:
        """In words."""
        factors = " x ".join(map(str, self.radices))
        hops = f"{self.hops} hop{'s' * (self.hops > 1)}"
        if self.algorithm is Algorithm.recursive_multiplying:
            return f"recursive multiplying among the nodes' leaders, {factors}: {hops}"
        mib = self.segment_nbytes / 2**20
        return f"reduce-scatter and all-gather, {factors}, in segments of {mib:g} MiB: {hops}"


@dataclass(frozen=True)
class Level:
    """One node's part in one level.

    Attributes:
        members: The nodes that exchange with each other, by their digit.
        digit: This node's.
        begin: First element of those that they all hold.
        count: How many.
    """

    members: tuple[int, ...]
    digit: int
    begin: int
    count: int

    @property
    def others(self) -> tuple[int, ...]:
        """Digits of the other members, those behind this one first."""
        radix = len(self.members)
        return tuple((self.digit + step) % radix for step in range(1, radix))

    def part(self, digit: int) -> tuple[int, int]:
        """First element and length of what one of the members reduces."""
        begin, count = split(self.count, len(self.members), digit)
        return self.begin + begin, count


@lru_cache(maxsize=1024)
def levels(plan: Plan, node: int, count: int) -> tuple[Level, ...]:
    """What a node does in every level.

    Args:
        plan: The plan.
        node: Index of the node.
        count: Elements of the buffer, or of the part of it that the exchanging ranks hold.
    """
    found, begin, stride = [], 0, 1
    for radix in plan.radices:
        digit = node // stride % radix
        first = node - digit * stride
        members = tuple(first + other * stride for other in range(radix))
        found.append(Level(members, digit, begin, count))
        if plan.algorithm is Algorithm.sharded:
            begin, count = found[-1].part(digit)
        stride *= radix
    return tuple(found)


def split(total: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of one of `parts` shares that differ by one at most."""
    least, more = divmod(total, parts)
    return index * least + min(index, more), least + (index < more)


@lru_cache
def factorings(nodes: int) -> tuple[tuple[int, ...], ...]:
    """Radices that keep the tree: equal powers of two, and what is left; the direct one first."""
    found: list[tuple[int, ...]] = [(nodes,)]
    for bits in range(1, MOST_LEADING_BITS + 1):
        radix, leading, rest = 1 << bits, 0, nodes
        while rest % radix == 0 and rest > radix:
            rest //= radix
            leading += 1
            found.append((radix,) * leading + (rest,))
    return tuple(dict.fromkeys(found))


def segments(plan: Plan, count: int, itemsize: int) -> Sequence[tuple[int, int]]:
    """First element and length of every segment of a sharded reduction."""
    length = max(1, plan.segment_nbytes // itemsize)
    return [(begin, min(length, count - begin)) for begin in range(0, count, length)]
