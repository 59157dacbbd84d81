"""The state that the operations of a group across nodes share on this rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import _native
from ..errors import SdpError, from_native
from ..nodes import Nodes
from ..wire_dtype import WireDType
from .residuals import Residuals
from .transport import Channel, Stream


@dataclass
class GroupContext:
    """State of a group on this rank.

    Attributes:
        rank: This rank.
        nodes: All ranks by node.
        native: The native group of this node's ranks.
        channel: Connects this rank with the ranks of other nodes.
        wire_dtype: How float32 values travel between nodes; None: unchanged.
        last_completed: The last operation that succeeded, for error messages.
        pools: Scratch memory, by name.
        residuals: What rounding for the wire has left out.
        node: Index of this rank's node.
        local_rank: Index of this rank among the ranks of its node.
        local_ranks: The ranks of this node.
        other_nodes: Indices of the other nodes, starting behind this one.
        remote_ranks: The ranks of the other nodes, in this order.
        channels: One channel for each stream of the collectives' messages.
    """

    rank: int
    nodes: Nodes
    native: _native.NativeGroup
    channel: Channel[Any]
    wire_dtype: WireDType | None = None
    last_completed: _native.OpSignature | None = None
    pools: dict[str, np.ndarray] = field(default_factory=dict)
    residuals: Residuals = field(default_factory=Residuals)

    def __post_init__(self) -> None:
        self.node = self.nodes.node_of(self.rank)
        self.local_rank = self.nodes.index_of(self.rank)
        self.local_ranks = self.nodes.members[self.node]
        self.channels: dict[Stream, Channel[Any]] = {Stream.data: self.channel}
        for stream in (Stream.inner_levels, Stream.results):
            self.channels[stream] = self.channel.branch(stream)
        self.other_nodes = tuple(
            (self.node + step) % self.nodes.count for step in range(1, self.nodes.count)
        )
        self.remote_ranks = tuple(
            rank for node in self.other_nodes for rank in self.nodes.members[node]
        )
        self._n_overdue = 0
        self._overdue_lock = threading.Lock()

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank represents its node to the other nodes."""
        return self.local_rank == 0

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of memory that stays valid until this name is requested again."""
        if name not in self.pools or self.pools[name].nbytes < nbytes:
            self.pools[name] = np.empty(max(nbytes, 1), np.uint8)
        return _native.address(self.pools[name])

    def trim(self, most_nbytes: int) -> None:
        """Free scratch memory above `most_nbytes`, the largest first; no message uses any."""
        held = sum(pool.nbytes for pool in self.pools.values())
        for name, pool in sorted(self.pools.items(), key=lambda item: -item[1].nbytes):
            if held <= most_nbytes:
                return
            held -= pool.nbytes
            del self.pools[name]

    def count_overdue(self, change: int) -> None:
        """Change the number of operations that wait for other nodes past their time-out."""
        with self._overdue_lock:
            self._n_overdue += change
            self.native.set_waiting_remote(self._n_overdue > 0)

    def closed_error(self) -> SdpError:
        """The error that every use of the group raises after it was closed."""
        failure = _native.Failure("closed", "the group is closed", [])
        failure.compose(self.native.error_prefix, self.rank)
        return from_native(failure)

    @property
    def global_ranks(self) -> list[int]:
        """All ranks by their numbers in the job; empty if these are not known."""
        return list(self.nodes.global_ranks or ())
