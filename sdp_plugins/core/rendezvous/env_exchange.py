"""Exchange between the ranks of a job that have only their environment."""

from __future__ import annotations

from ..rank_names import RankNames
from ..topology import Topology
from .bootstrap_address import listen, root_addresses
from .bootstrap_client import join
from .bootstrap_messages import MAX_BLOB_NBYTES
from .bootstrap_root import BootstrapRoot
from .context import RendezvousContext
from .deadline import Deadline


class EnvExchange:
    """All-gathers one blob per rank through rank 0; an ``Exchange``.

    Rank 0 listens on an abstract Unix socket whose name is derived from user, job and group; the
    other ranks connect to it, in any order of starting. The exchange runs in the calling thread and
    leaves nothing behind, so the name can be reused at once. Only processes of the same user
    take part; other connections are refused and have no effect.
    """

    def __init__(self, topology: Topology, name: str) -> None:
        """Prepare; nothing is opened yet. Groups made at the same time need different names."""
        self.topology = topology
        self.name = name

    def __call__(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Exchange blobs of at most 64 KiB; see ``Exchange``.

        The earliest deadline of the connected ranks ends it for all.

        Raises:
            ValueError: The blob is too long.
            PeerLostError: A rank's process ended meanwhile.
            RendezvousTimeoutError: Ranks did not arrive in time.
            RendezvousError: Two processes claim one rank, world sizes differ, or another job
                holds the address.
        """
        if len(blob) > MAX_BLOB_NBYTES:
            raise ValueError(f"a blob has at most {MAX_BLOB_NBYTES} bytes, not {len(blob)}")
        rank, world_size = self.topology.rank, self.topology.world_size
        if world_size == 1:
            return [blob]
        context = RendezvousContext(rank, RankNames(self.name, world_size), Deadline(timeout_s))
        addresses = root_addresses(self.topology.job_key, self.name)
        with context.raising_errors():
            if rank > 0:
                return join(addresses, blob, context)
            return BootstrapRoot(listen(addresses, context.deadline), context).gather(blob)
