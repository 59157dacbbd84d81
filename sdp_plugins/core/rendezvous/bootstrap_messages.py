"""What the ranks of a bootstrap tell each other, beside what ``messages`` has."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .messages import MessageKind, pack_message

MAX_BLOB_NBYTES = 64 * 1024
PART_NBYTES = 64 * 1024  # of a table

_HELLO = struct.Struct("<IIdd")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Hello:
    """A rank introduces itself.

    Attributes:
        rank: Its rank.
        world_size: The world size it was started with.
        timeout_s: Its time-out.
        remaining_s: What is left of that.
        blob: What it contributes.
    """

    rank: int
    world_size: int
    timeout_s: float
    remaining_s: float
    blob: bytes

    def pack(self) -> bytes:
        """Return the whole packet."""
        head = _HELLO.pack(self.rank, self.world_size, self.timeout_s, self.remaining_s)
        return pack_message(MessageKind.HELLO, head + self.blob)

    @classmethod
    def unpack(cls, content: bytes) -> Hello:
        """Read a packet's content.

        Raises:
            ValueError: It is too short.
        """
        if len(content) < _HELLO.size:
            raise ValueError("short hello")
        rank, world_size, timeout_s, remaining_s = _HELLO.unpack_from(content)
        return cls(rank, world_size, timeout_s, remaining_s, content[_HELLO.size :])


def pack_table(blobs: Sequence[bytes]) -> list[bytes]:
    """Return the packets that hold every rank's blob; only the last one is not full."""
    content = b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)
    starts = range(0, len(content) + 1, PART_NBYTES)
    return [pack_message(MessageKind.TABLE, content[at : at + PART_NBYTES]) for at in starts]


def unpack_table(content: bytes, world_size: int) -> list[bytes]:
    """Read the contents of a table's packets, one after the other.

    Raises:
        ValueError: They do not hold exactly one blob per rank.
    """
    blobs, at = [], 0
    for _ in range(world_size):
        if at + _LENGTH.size > len(content):
            raise ValueError("short table")
        (nbytes,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        blobs.append(content[at : at + nbytes])
        at += nbytes
    if at != len(content):
        raise ValueError("table of another size")
    return blobs
