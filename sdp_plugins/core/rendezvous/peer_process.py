"""Identifies the process at the other end of a Unix socket, and detects its end."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_UCRED = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; the number is the same on x86-64 and aarch64


@dataclass(frozen=True)
class Credentials:
    """The kernel's credentials of the process at the other end.

    For the connecting side, that is the process that called ``listen``.

    Attributes:
        pid: Process id in our pid namespace; 0 if it is not visible there.
        uid: Effective user id, in our user namespace.
    """

    pid: int
    uid: int

    @property
    def is_ours(self) -> bool:
        """Whether the process belongs to this user."""
        return self.uid == os.geteuid()


def credentials(sock: socket.socket) -> Credentials:
    """Return the credentials of the other end when the connection was made."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid)


def open_pidfd(sock: socket.socket) -> int:
    """Return a descriptor that becomes readable when the other process ends; -1 if impossible.

    Unlike a hang-up of the socket, this is not delayed by forked children that hold a copy.
    """
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid = credentials(sock).pid
    if pid > 0:
        with suppress(OSError):
            return os.pidfd_open(pid)
    return -1


def has_ended(sock: socket.socket) -> bool:
    """Whether the process at the other end is known to have ended."""
    pidfd = open_pidfd(sock)
    if pidfd < 0:
        pid = credentials(sock).pid
        return pid > 0 and not _exists(pid)
    try:
        return is_readable(pidfd)
    finally:
        os.close(pidfd)


def is_readable(fd: int) -> bool:
    """Whether a descriptor is readable, or has hung up, now."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def accepted(listener: socket.socket, most: int) -> Iterator[tuple[socket.socket, Credentials]]:
    """Take the connections that wait, at most so many; all sockets are non-blocking."""
    for _ in range(most):
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionError:
            continue
        sock.setblocking(False)
        yield sock, credentials(sock)


def close_listener(listener: socket.socket) -> None:
    """Stop listening at once, even if a forked child holds a copy of the socket."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
