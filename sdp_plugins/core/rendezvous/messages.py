"""Messages between ranks that meet: each is one packet with a magic number, a version and a kind.

Everything is read with ``struct``; nothing that a peer sends is ever executed or unpickled.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from dataclasses import dataclass, field
from enum import IntEnum

VERSION = 3
MAX_NBYTES = 96 * 1024

_MAGIC = b"SDPL"
_HEAD = struct.Struct("<4sHH")
_MAX_FDS = 8  # more than anyone sends: what came too much has to be closed, not cut off
# The last one: the kernel counts descriptors on their way per user, and peers free it by receiving.
_TRY_LATER = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS})


class MessageKind(IntEnum):
    """The kind of a packet."""

    INTRODUCTION = 1  # who I am; my segment comes with it
    DONE = 2  # I have received all introductions
    ABORT = 3  # I give up, for this reason
    HELLO = 4  # to rank 0: who I am, and my blob
    WELCOME = 5  # from rank 0: you are one of us
    TABLE = 6  # from rank 0: the blobs of all ranks, or a part of them


class VersionError(ValueError):
    """Raised for a message of another version of the protocol. Use one version in all ranks."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}")


@dataclass
class Packet:
    """One packet as it was received.

    Attributes:
        data: The bytes; empty at the end of the connection.
        fds: Descriptors that came with it, close-on-exec; whoever takes one removes it.
    """

    data: bytes
    fds: list[int] = field(default_factory=list)

    def parse(self) -> tuple[MessageKind, bytes]:
        """Return kind and content.

        Raises:
            ValueError: It is not a packet of this protocol.
        """
        if len(self.data) < _HEAD.size:
            raise ValueError("no message")
        magic, version, kind = _HEAD.unpack_from(self.data)
        if magic != _MAGIC:
            raise ValueError("no message")
        if version != VERSION:
            raise VersionError(version)
        return MessageKind(kind), self.data[_HEAD.size :]

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self.fds:
            os.close(self.fds.pop())


def pack_message(kind: MessageKind, content: bytes = b"") -> bytes:
    """Return a packet."""
    return _HEAD.pack(_MAGIC, VERSION, kind) + content


def send_message(sock: socket.socket, data: bytes, fd: int = -1) -> bool:
    """Send one packet, with a descriptor if one is given; never waits.

    Returns:
        False if it cannot be sent now: try again.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    try:
        sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        if error.errno in _TRY_LATER or (error.errno == errno.EMSGSIZE and _enlarge(sock, data)):
            return False
        raise
    return True


def _enlarge(sock: socket.socket, data: bytes) -> bool:
    """Make room for a packet in a buffer of net.core.wmem_default bytes, up to wmem_max."""
    before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data))  # which Linux doubles
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before


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
    return Packet(b"?" if flags & socket.MSG_TRUNC else data, list(fds))  # too long: none of ours
