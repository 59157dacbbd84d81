"""The announcement that ranks exchange before they connect."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from dataclasses import dataclass

from ..process_identity import clock_id, namespace

ANNOUNCEMENT_NBYTES = 256
"""Every announcement has this size, so that a plain all_gather can exchange them."""

_MAGIC = b"SDPA"
_VERSION = 3
_LAYOUT = struct.Struct("<4sHHIIIIQ16s16s36s64si")


@dataclass(frozen=True)
class Place:
    """Where a process runs; processes in one place can connect by abstract Unix sockets.

    Used to explain a failure, never to predict one.

    Attributes:
        boot_id: The running kernel; the host's name if that is unknown.
        network: Inode of the network namespace.
        host: Host name.
    """

    boot_id: str
    network: int
    host: str

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process; an unknown network is 0."""
        host = _fit(socket.gethostname()).decode(errors="replace")
        return cls(clock_id()[:36], namespace("net"), host)


@dataclass(frozen=True)
class RankAnnouncement:
    """The address of a rank, and its proof of membership.

    Attributes:
        rank: Its rank.
        world_size: The world size it knows.
        pid: Its process id, in its own pid namespace.
        uid: Its effective user id, in its own user namespace.
        token: Names its listening socket.
        nonce: A secret: a rank that connects presents it to prove that it is of the group.
        place: Where it runs.
        global_rank: Its rank in the job, as its launcher says; -1: none does.
    """

    rank: int
    world_size: int
    pid: int
    uid: int
    token: bytes
    nonce: bytes
    place: Place
    global_rank: int = -1

    @classmethod
    def new(cls, rank: int, world_size: int, global_rank: int = -1) -> RankAnnouncement:
        """Return a fresh announcement of this process."""
        token, nonce = secrets.token_bytes(16), secrets.token_bytes(16)
        pid, uid = os.getpid(), os.geteuid()
        return cls(rank, world_size, pid, uid, token, nonce, Place.here(), global_rank)

    @property
    def address(self) -> bytes:
        """Abstract address of the listening socket."""
        return b"\0sdp_plugins-rank-" + self.token.hex().encode()

    def pack(self) -> bytes:
        """Return the announcement as ``ANNOUNCEMENT_NBYTES`` bytes."""
        place = self.place
        packed = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            0,
            self.rank,
            self.world_size,
            self.pid,
            self.uid,
            place.network,
            self.token,
            self.nonce,
            place.boot_id.encode(),
            _fit(place.host),
            self.global_rank,
        )
        return packed.ljust(ANNOUNCEMENT_NBYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> RankAnnouncement:
        """Read what ``pack`` wrote.

        Raises:
            ValueError: The bytes are something else.
        """
        if len(data) != ANNOUNCEMENT_NBYTES:
            raise ValueError(f"an announcement of {len(data)} bytes")
        magic, version, _, rank, world_size, pid, uid, network, *texts, global_rank = (
            _LAYOUT.unpack_from(data)
        )
        if magic != _MAGIC:
            raise ValueError("no announcement")
        if version != _VERSION:
            raise ValueError(f"an announcement of version {version}")
        token, nonce, boot_id, host = texts
        place = Place(_text(boot_id), network, _text(host))
        return cls(rank, world_size, pid, uid, token, nonce, place, global_rank)


def _fit(host: str) -> bytes:
    return host.encode(errors="replace")[:64]


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
