"""Messages between two ranks that connect: each is one packet with a magic number and a kind."""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass, field
from enum import IntEnum

MAX_NBYTES = 32 * 1024

_MAGIC = b"SDPL"
_HEAD = struct.Struct("<4sI")
_INTRODUCTION = struct.Struct("<I16s16s")
_MAX_FDS = 8  # more than anyone sends: what came too much has to be closed, not cut off


class MessageKind(IntEnum):
    """What a packet says."""

    INTRODUCTION = 1  # who I am; my segment comes with it
    DONE = 2  # I have received all introductions
    ABORT = 3  # I give up, for this reason


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
            ValueError: It is no introduction.
        """
        if len(content) != _INTRODUCTION.size:
            raise ValueError("no introduction")
        return cls(*_INTRODUCTION.unpack(content))


@dataclass
class Packet:
    """One packet as it was received.

    Attributes:
        data: The bytes; empty at the end of the connection.
        fds: Descriptors that came with it, close-on-exec; whoever takes one removes it.
        truncated: Whether bytes or descriptors were lost: they were too many, or this process has
            no free descriptors.
    """

    data: bytes
    fds: list[int] = field(default_factory=list)
    truncated: bool = False

    def parse(self) -> tuple[MessageKind, bytes]:
        """Return kind and content.

        Raises:
            ValueError: It is none of ours.
        """
        if len(self.data) < _HEAD.size:
            raise ValueError("no message")
        magic, kind = _HEAD.unpack_from(self.data)
        if magic != _MAGIC:
            raise ValueError("no message")
        return MessageKind(kind), self.data[_HEAD.size :]

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.pop())


def pack_message(kind: MessageKind, content: bytes = b"") -> bytes:
    """Return a packet."""
    return _HEAD.pack(_MAGIC, kind) + content


def send_message(sock: socket.socket, data: bytes, fd: int = -1) -> None:
    """Send one packet, with a descriptor if one is given; never waits."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive_message(sock: socket.socket) -> Packet:
    """Receive one packet; never waits.

    Raises:
        BlockingIOError: There is none.
    """
    room = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    while True:
        try:
            data, rights, flags, _ = sock.recvmsg(
                MAX_NBYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
            break
        except ConnectionResetError:
            # The peer closed with packets of ours unread. The kernel says so once, before it gives
            # out what the peer had sent earlier; the end of the connection follows that.
            continue
    fds = array.array("i")
    for level, kind, content in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    return Packet(data, list(fds), cut)
