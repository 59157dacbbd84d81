"""Messages of the exchange: a header with magic, version, kind and size, then bounded content.

Everything is read with ``struct``; nothing that a peer sends is ever executed or unpickled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
MAX_BLOB_NBYTES = 64 * 1024
MAX_FAILURE_NBYTES = 32 * 1024

_MAGIC = b"SDPR"
_HEADER = struct.Struct("<4sHHI")
_HELLO = struct.Struct("<IIdd")
_LENGTH = struct.Struct("<I")


class FrameKind(IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    TABLE = 3
    FAILURE = 4


_KINDS = frozenset(map(int, FrameKind))


class FrameError(ValueError):
    """Raised for bytes that are no frame of ours. Drop the connection."""


class VersionError(FrameError):
    """Raised for a frame of another version of the protocol. Use one version in all ranks."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}")
        self.version = version


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
        """Return the whole frame."""
        head = _HELLO.pack(self.rank, self.world_size, self.timeout_s, self.remaining_s)
        return pack_frame(FrameKind.HELLO, head + self.blob)

    @classmethod
    def unpack(cls, content: bytes) -> Hello:
        """Read a frame's content.

        Raises:
            FrameError: It is too short.
        """
        if len(content) < _HELLO.size:
            raise FrameError("short hello")
        rank, world_size, timeout_s, remaining_s = _HELLO.unpack_from(content)
        return cls(rank, world_size, timeout_s, remaining_s, content[_HELLO.size :])


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_nbytes: int) -> None:
        """Start with nothing read.

        Args:
            max_nbytes: Longest content that is accepted.
        """
        self._max_nbytes = max_nbytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._buffer += data

    def next(self) -> tuple[FrameKind, bytes] | None:
        """Return the next whole frame, None if there is none yet.

        Raises:
            FrameError: These are no frames, or one is longer than allowed.
        """
        magic = bytes(self._buffer[: len(_MAGIC)])
        if not _MAGIC.startswith(magic):
            raise FrameError("no frame")
        if len(self._buffer) < _HEADER.size:
            return None
        _, version, kind, nbytes = _HEADER.unpack_from(self._buffer)
        if version != VERSION:
            raise VersionError(version)
        if nbytes > self._max_nbytes or kind not in _KINDS:
            raise FrameError(f"frame of kind {kind} with {nbytes} bytes")
        end = _HEADER.size + nbytes
        if len(self._buffer) < end:
            return None
        content = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return FrameKind(kind), content


def max_hello_nbytes() -> int:
    """Return the size of the longest hello."""
    return _HELLO.size + MAX_BLOB_NBYTES


def max_table_nbytes(world_size: int) -> int:
    """Return the size of the longest table, or of a failure in its place."""
    return max(world_size * (_LENGTH.size + MAX_BLOB_NBYTES), MAX_FAILURE_NBYTES)


def pack_frame(kind: FrameKind, content: bytes = b"") -> bytes:
    """Return a frame."""
    return _HEADER.pack(_MAGIC, VERSION, kind, len(content)) + content


def pack_table(blobs: list[bytes]) -> bytes:
    """Return the frame that holds every rank's blob."""
    content = b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)
    return pack_frame(FrameKind.TABLE, content)


def unpack_table(content: bytes, world_size: int) -> list[bytes]:
    """Read the content of a table.

    Raises:
        FrameError: It does not hold exactly one blob per rank.
    """
    blobs, at = [], 0
    for _ in range(world_size):
        if at + _LENGTH.size > len(content):
            raise FrameError("short table")
        (nbytes,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        blobs.append(content[at : at + nbytes])
        at += nbytes
    if at != len(content):
        raise FrameError("table of another size")
    return blobs
