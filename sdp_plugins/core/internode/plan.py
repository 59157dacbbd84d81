"""The plan of a reduction among nodes: arithmetic, without a network.

The number of nodes M is written as a product of radices r1 r2 ... rk, and a node's index in these
radices, lowest digit first. At level i the nodes that differ only in digit i exchange directly.
Radices (M,) are the direct exchange of SMDDP's balanced fusion buffers. (2, 2, ..., 2) are
recursive halving and doubling. Radices in between trade hops for messages (Ruefenacht, Bull and
Booth, 2017, call it recursive multiplying). For a buffer of S bytes:

- ``sharded``: a reduce-scatter, each level of which divides a node's part by the level's radix, and
  then an all-gather along the same levels: 2k hops, and 2S(M-1)/M bytes over every link in each
  direction for any radices.
- ``recursive_multiplying``: every level exchanges the whole buffer: k hops,
  S(r1 - 1 + ... + rk - 1) bytes.

All radices but the last are powers of two. The sum then follows the same tree over all nodes (see
``nodes.py``), so every plan gives the same bits, and the choice of a plan cannot change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import prod

ALIGN_ELEMS = 32
MOST_LEADING_BITS = 4
"""Leading radices are at most 2^4 = 16; the last radix is the remaining factor."""


class Algorithm(Enum):
    """The algorithm of a reduction between nodes."""

    recursive_multiplying = "recursive_multiplying"
    sharded = "sharded"


@dataclass(frozen=True)
class Plan:
    """The algorithm of a reduction and its parameters.

    Attributes:
        algorithm: The algorithm.
        radices: Factors of the number of nodes, one for each level.
        segment_nbytes: Bytes of the buffer in a segment of a sharded reduction.
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
        """Number of messages in sequence."""
        return len(self.radices) * (1 if self.algorithm is Algorithm.recursive_multiplying else 2)

    @property
    def messages(self) -> int:
        """Number of messages that a rank sends for each segment; it receives as many."""
        once = sum(radix - 1 for radix in self.radices)
        return once if self.algorithm is Algorithm.recursive_multiplying else 2 * once

    def sent(self, size: float) -> float:
        """Bytes that a node sends for a buffer of `size` bytes; it receives as many."""
        if self.algorithm is Algorithm.recursive_multiplying:
            return self.messages * size
        return 2 * size * (self.nodes - 1) / self.nodes

    def __str__(self) -> str:
        """Describe the plan in words."""
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
        digit: This node's digit.
        begin: First element of the range that all members hold.
        count: Number of elements in that range.
    """

    members: tuple[int, ...]
    digit: int
    begin: int
    count: int

    @property
    def others(self) -> tuple[int, ...]:
        """Digits of the other members, starting behind this one."""
        radix = len(self.members)
        return tuple((self.digit + step) % radix for step in range(1, radix))

    def part(self, digit: int) -> tuple[int, int]:
        """First element and length of the part that a member reduces."""
        begin, count = split(self.count, len(self.members), digit)
        return self.begin + begin, count


@lru_cache(maxsize=1024)
def levels(plan: Plan, node: int, count: int) -> tuple[Level, ...]:
    """Return a node's part in every level.

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
    """First element and length of one of `parts` shares, whose lengths differ by at most one."""
    least, more = divmod(total, parts)
    return index * least + min(index, more), least + (index < more)


@lru_cache
def factorings(nodes: int) -> tuple[tuple[int, ...], ...]:
    """Radices that keep the tree: (`nodes`,) first, then equal powers of two and the rest."""
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


def shard(total: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of one of `parts` equal shards.

    All start at multiples of 32 elements and only the last ones are shorter, as in the native
    core's ``Shards``.
    """
    length = -(-total // parts)
    length = -(-length // ALIGN_ELEMS) * ALIGN_ELEMS
    begin = min(index * length, total)
    return begin, min(length, total - begin)
