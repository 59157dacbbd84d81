"""One peer, while the ranks of a group connect, and how ranks introduce themselves."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

from .announcement import RankAnnouncement
from .failure import RendezvousFailure
from .messages import MessageKind, pack_message, send_message
from .peer_process import credentials, is_readable, open_pidfd

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


@dataclass(eq=False)
class MeshPeer:
    """One rank's descriptors of another rank.

    Attributes:
        announcement: The peer's announcement.
        outgoing: The connection that this rank opened: it only sends there.
        incoming: The connection that the peer opened: this rank only receives there.
        pidfd: Descriptor of its process, -1 if there is none.
        segment_fd: Its segment, -1 before its introduction.
        done: Whether it has received all introductions.
    """

    announcement: RankAnnouncement
    outgoing: socket.socket | None = None
    incoming: socket.socket | None = None
    pidfd: int = -1
    segment_fd: int = -1
    done: bool = False
    _outbox: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.announcement.rank

    @property
    def sent(self) -> bool:
        """Whether nothing waits to be sent."""
        return self.outgoing is not None and not self._outbox

    def connect(self, me: RankAnnouncement, segment_fd: int) -> bool:
        """Connect, introduce this rank and pass its segment.

        Returns:
            False if its backlog is full: try again.

        Raises:
            ConnectionRefusedError: Nobody listens there.
            RendezvousFailure: Somebody else does.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect(self.announcement.address)
            if not credentials(sock).is_ours:
                raise self.other_user()
        except BlockingIOError:
            sock.close()
            return False
        except BaseException:
            sock.close()
            raise
        self.outgoing = sock
        self.pidfd = open_pidfd(sock)
        introduction = Introduction(me.rank, me.nonce, self.announcement.nonce)
        self._outbox.append((introduction.pack(), segment_fd))
        self.flush()
        return True

    def send(self, kind: MessageKind, content: bytes = b"") -> None:
        """Send a message after all earlier ones."""
        self._outbox.append((pack_message(kind, content), -1))
        self.flush()

    def flush(self) -> None:
        """Send as much as possible; on a broken connection discard all, its hang-up is detected."""
        while self.outgoing is not None and self._outbox:
            try:
                if not send_message(self.outgoing, *self._outbox[0]):
                    return
            except ConnectionError:
                self._outbox.clear()
                return
            del self._outbox[0]

    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.pidfd >= 0 and is_readable(self.pidfd)

    def detach_link(self, my_rank: int) -> int:
        """Return the descriptor of the kept connection: the one that the higher rank opened."""
        kept, other = (
            (self.outgoing, self.incoming)
            if my_rank > self.rank
            else (self.incoming, self.outgoing)
        )
        assert kept is not None
        if other is not None:
            hang_up(other)
        self.outgoing = self.incoming = None
        return kept.detach()

    def detach_fds(self) -> tuple[int, int]:
        """Return segment and pidfd, which the caller then owns."""
        fds = self.segment_fd, self.pidfd
        self.segment_fd = self.pidfd = -1
        return fds

    def close(self) -> None:
        """Close everything that was not detached."""
        for sock in (self.outgoing, self.incoming):
            if sock is not None:
                hang_up(sock)
        self.outgoing = self.incoming = None
        for fd in self.detach_fds():
            if fd >= 0:
                os.close(fd)

    def other_user(self) -> RendezvousFailure:
        """Return the reason to refuse a peer of another user."""
        return RendezvousFailure.refused(
            f"rank {self.rank} runs as user {self.announcement.uid}, this rank as {os.geteuid()}",
            "run all ranks as one user",
            [self.rank],
        )


def hang_up(sock: socket.socket) -> None:
    """Close a connection so that the peer sees it even if a forked child holds a copy."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
