"""The ranks of a group by node, that is, by shared memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .rank_names import name_ranks


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node.

    Attributes:
        members: The ranks of every node, ascending; nodes are in the order of their lowest rank.
        hosts: Every node's host name.
        global_ranks: Every rank's number in the job, for messages; None: they call it as the group.
    """

    members: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    global_ranks: tuple[int, ...] | None = None

    @classmethod
    def of_places(
        cls,
        places: Sequence[Hashable],
        hosts: Sequence[str],
        global_ranks: tuple[int, ...] | None = None,
    ) -> Nodes:
        """Group ranks by place, which is equal for ranks that can share memory."""
        ranks_at: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            ranks_at.setdefault(place, []).append(rank)
        members = tuple(tuple(ranks) for ranks in ranks_at.values())
        return cls(members, tuple(hosts[ranks[0]] for ranks in members), global_ranks)

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.members))

    @cached_property
    def rails(self) -> int:
        """Number of ranks per node that exchange data with other nodes: the smallest node's."""
        return min(map(len, self.members))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, index)
            for node, ranks in enumerate(self.members)
            for index, rank in enumerate(ranks)
        }

    def node_of(self, rank: int) -> int:
        """Index of a rank's node."""
        return self._places[rank][0]

    def index_of(self, rank: int) -> int:
        """A rank's index among the ranks of its node."""
        return self._places[rank][1]

    def counterpart(self, rank: int, node: int) -> int:
        """The rank of `node` that exchanges data with a rank of another node."""
        ranks = self.members[node]
        return ranks[self.index_of(rank) % len(ranks)]

    def global_rank(self, rank: int) -> int:
        """What messages call a rank."""
        return rank if self.global_ranks is None else self.global_ranks[rank]

    def name(self, ranks: Sequence[int]) -> str:
        """Write ranks for a message: ``rank 1 on node0, ranks 4-6 on node1``."""
        by_host: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.hosts[self.node_of(rank)], []).append(self.global_rank(rank))
        return ", ".join(f"{name_ranks(there)} on {host}" for host, there in by_host.items())


def tree(parts: Sequence[object]) -> object:
    """The order in which parts are added, as nested pairs: ((0 + 1) + (2 + 3)) + 4."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return tree(parts[:half]), tree(parts[half:])
