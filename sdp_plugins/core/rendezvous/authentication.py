"""How a process that connects to a rank proves that it is a member of the same group."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .announcement import RankAnnouncement
from .messages import MessageKind, pack_message

_INTRODUCTION = struct.Struct("<I16s16s")


@dataclass(frozen=True)
class Introduction:
    """How a rank introduces itself to a peer.

    Attributes:
        rank: The rank itself.
        nonce: Its nonce.
        peer_nonce: The peer's nonce.
    """

    rank: int
    nonce: bytes
    peer_nonce: bytes

    def pack(self) -> bytes:
        """Return the whole packet."""
        return pack_message(
            MessageKind.INTRODUCTION, _INTRODUCTION.pack(self.rank, self.nonce, self.peer_nonce)
        )

    @classmethod
    def unpack(cls, content: bytes) -> Introduction:
        """Read a packet's content.

        Raises:
            ValueError: It is not an introduction.
        """
        if len(content) != _INTRODUCTION.size:
            raise ValueError("no introduction")
        return cls(*_INTRODUCTION.unpack(content))

    def proves(self, peer: RankAnnouncement, me: RankAnnouncement) -> bool:
        """Whether only that member of this rank's group can have sent it."""
        return self.nonce == peer.nonce and self.peer_nonce == me.nonce
