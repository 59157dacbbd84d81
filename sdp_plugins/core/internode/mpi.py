"""MPI as the network between nodes and as the rendezvous of a job."""

from __future__ import annotations

import struct
import time

from ..errors import RendezvousError
from ..nodes import Nodes
from ..rank_names import RankNames
from ..rendezvous.store_exchange import Exchange
from . import mpi_library
from .mpi_channel import MpiChannel
from .mpi_runtime import runtime

_CARD = struct.Struct("<IIII")


class MpiNetwork:
    """Opens channels over MPI."""

    name = "MPI"

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> MpiChannel:
        """Open a channel: agree on ranks, a tag, and a communicator if there is none yet."""
        mpi = runtime()
        end = time.monotonic() + timeout_s
        with mpi.meeting():
            card = _CARD.pack(mpi.rank, mpi.size, mpi.draw_tag(), mpi.has_own_communicator)
            cards = [_CARD.unpack(blob) for blob in exchange(card, timeout_s)]
            ranks = [world_rank for world_rank, *_ in cards]
            prefix = RankNames(name, nodes.world_size, nodes.global_ranks).error_prefix(rank)
            if len(set(ranks)) < len(ranks) or {size for _, size, *_ in cards} != {mpi.size}:
                raise RendezvousError(
                    f"{prefix}rendezvous: these ranks do not belong to one MPI job: in MPI's "
                    f"world they are {ranks} of {[size for _, size, *_ in cards]}. Hint: "
                    f"{mpi_library.choose_library()}; in PyTorch SDP_INTERNODE=gloo does "
                    "without MPI."
                )
            tag = cards[0][2]  # unique: each rank draws from its own tags
            mpi.check_tag(tag)
            have_own = [bool(has_own) for *_, has_own in cards]
            if len(cards) == mpi.size and not any(have_own):
                mpi.duplicate(end)
                have_own = [True]
            # Ranks without a communicator of their own use COMM_WORLD, where the program's receive
            # of any tag could take our messages.
            comm = mpi.comm if all(have_own) else mpi.world
            return MpiChannel(mpi, comm, rank, nodes, ranks, tag)


class MpiExchange:
    """All-gathers one blob per rank of MPI's world; an ``Exchange``."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def __call__(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Exchange blobs.

        Raises:
            RendezvousTimeoutError: Ranks did not arrive in time.
        """
        mpi = runtime()
        with mpi.meeting():
            if (mpi.rank, mpi.size) != (self._rank, self._world_size):
                raise RendezvousError(
                    f"this is rank {self._rank} of {self._world_size} by the launcher's variables, "
                    f"but {mpi.rank} of {mpi.size} in MPI's world. Hint: "
                    f"{mpi_library.choose_library()}."
                )
            end = time.monotonic() + timeout_s
            if not mpi.has_own_communicator:
                mpi.duplicate(end)
            lengths = bytearray(4 * mpi.size)
            mpi.all_gather(struct.pack("<I", len(blob)), lengths, end)
            sizes = struct.unpack(f"<{mpi.size}I", lengths)
            longest = max(sizes)
            blobs = bytearray(longest * mpi.size)
            mpi.all_gather(blob.ljust(longest, b"\0"), blobs, end)
            return [bytes(blobs[i * longest : i * longest + n]) for i, n in enumerate(sizes)]
