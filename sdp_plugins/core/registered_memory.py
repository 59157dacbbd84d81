"""Memory that the ranks of a node map, so that operations on it copy nothing."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from .collectives import Collectives
from .in_flight import Issuer
from .nodes import Nodes

_NOTHING = memoryview(b""), memoryview(b"")


class RegisteredMemory(Collectives):
    """The part of a group that knows which ranks share a node, and shares memory with them."""

    def __init__(self, issuer: Issuer, rank: int, nodes: Nodes) -> None:
        super().__init__(issuer, rank, nodes.world_size)
        self.nodes = nodes

    @property
    def local_rank(self) -> int:
        """Rank among the ranks of this node."""
        return self.nodes.index_of(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self.nodes.members[self.node_rank])

    @property
    def node_rank(self) -> int:
        """Index of this node, in the order of the nodes' lowest ranks."""
        return self.nodes.node_of(self.rank)

    def register(self, ptr: int, nbytes: int, fd: int, offset: int = 0) -> int:
        """Offer memory to the peers, so that ``all_reduce`` on it (or a part) copies nothing.

        Args:
            ptr: Start of a shared mapping (``MAP_SHARED``) of the file.
            nbytes: Its size.
            fd: The file; duplicated.
            offset: Where in the file the mapping starts, a multiple of the page size.

        Returns:
            The id for ``unregister``. Ids are never used twice. Peers keep the memory mapped until
            they hear of ``unregister`` in a later operation.
        """
        return self.issuer.node.add_region(ptr, nbytes, fd, offset)

    def unregister(self, region: int) -> None:
        """Take memory back; must come before its address can be used for anything else."""
        self.issuer.node.remove_region(region)

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate zero-filled registered memory, freed with its last reference."""
        return self._allocate(nbytes)[0][0]

    def allocate_on_node(self, nbytes: int) -> list[memoryview]:
        """Allocate zero-filled registered memory on each rank and map that of others; a collective.

        What one rank of the node writes, the others read. Memory is freed with the last reference
        on any of them; it outlives the group.

        Args:
            nbytes: Size of this rank's; 0: none.

        Returns:
            The memory of this node's ranks, in their order.
        """
        return [memory for memory, _ in self._on_node(nbytes, with_view=False)]

    def allocate_with_view(self, nbytes: int) -> tuple[memoryview, memoryview]:
        """Allocate zero-filled memory that the node has once; a collective.

        The ranks write into it what all of them are to read, and read it in a view. A write into
        the view is seen by this rank only: its pages no longer show the memory (copy on write)
        until `_native.drop_pages`; `_native.written_pages` finds them.

        Args:
            nbytes: Size of the memory, the same on all ranks.

        Returns:
            The memory, and this rank's view of it; both outlive the group.
        """
        return self._on_node(0 if self.local_rank else nbytes, with_view=True)[0]

    def _on_node(self, nbytes: int, with_view: bool) -> list[tuple[memoryview, memoryview]]:
        """Allocate memory, and map that of the node's other ranks; each with a view, or without."""
        memory, region = self._allocate(nbytes, with_view) if nbytes else (_NOTHING, 0)
        told = np.zeros((self.world_size, 2), np.int64)
        self.all_gather(told, np.array([region, nbytes], np.int64))
        sizes = told[list(self.nodes.members[self.node_rank])].tolist()
        found = {self.local_rank: memory}
        complete = np.zeros(1, np.uint8)
        while not complete:  # the message about a region may come with a later operation
            for peer, (region, size) in enumerate(sizes):
                mapped = None if peer in found else self._map(peer, region, size)
                if mapped is not None:
                    found[peer] = mapped
            complete[0] = len(found) == len(sizes)
            self.all_reduce(complete, "min")
        return [found[peer] for peer in range(len(sizes))]

    def _map(self, peer: int, region: int, nbytes: int) -> tuple[memoryview, memoryview] | None:
        if nbytes == 0:
            return _NOTHING
        mapped = self.issuer.node.map_region(peer, region)
        return _memories(*mapped[:2], nbytes, _hold, mapped[2]) if mapped else None

    def _allocate(
        self, nbytes: int, with_view: bool = False
    ) -> tuple[tuple[memoryview, memoryview], int]:
        if not 0 < nbytes < 2**63:
            raise ValueError(f"allocate: cannot allocate {nbytes} bytes")
        node = self.issuer.node
        memory, view, region = node.allocate(nbytes, with_view)
        # Holds the group's native object, in which the memory lives.
        return _memories(memory, view, nbytes, node.free, region), region


def _hold(_owner: object) -> None:
    """Called when memory is freed; its owner has lived as long as an argument of this call."""


def _memories(memory: int, view: int, nbytes: int, *freed_by: Any) -> tuple[memoryview, memoryview]:
    """The bytes at two addresses, of which the second may be 0; freed with the last of them."""
    array = _bytes_at(memory, nbytes, *freed_by)
    viewed = _bytes_at(view, nbytes, _hold, array) if view else b""
    return memoryview(array).cast("B"), memoryview(viewed).cast("B")


def _bytes_at(address: int, nbytes: int, *freed_by: Any) -> Any:
    array = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(array, *freed_by).atexit = False  # at exit the process frees all
    return array
