"""Where a process listens for the other ranks of its job."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

from .connection import Connection
from .forks import close_in_children
from .handle import Handle

_BACKLOG = 4096


class Listener:
    """A TCP socket that listens until the process ends.

    The kernel accepts connections for it, so nothing runs here until somebody is expected. A
    connection that is refused tells that the process has ended.

    Args:
        host: The address of this host to listen on.

    Raises:
        OSError: The address is not this host's.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.setblocking(False)
            self.socket.bind((host, 0))
            self.socket.listen(_BACKLOG)
        except BaseException:
            self.socket.close()
            raise
        self.handle = Handle(host, self.socket.getsockname()[1], secrets.token_hex(16))
        close_in_children(self)

    def accept(self) -> Iterator[Connection]:
        """Take the connections that wait."""
        while True:
            try:
                yield Connection(self.socket.accept()[0])
            except BlockingIOError:
                return
            except ConnectionError:
                continue

    def close(self) -> None:
        """Refuse all connections from now on."""
        self.socket.close()
