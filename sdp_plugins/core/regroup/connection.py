"""Messages over TCP connections that never block."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from typing import Any

from .forks import close_in_children
from .handle import Handle

_HEAD = struct.Struct("!I")
_MOST_NBYTES = 2**24  # the blobs of thousands of ranks
_READ_NBYTES = 2**16


class Connection:
    """Sends and receives JSON objects, each after its length.

    Args:
        sock: A TCP socket, which may still be connecting; the connection owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._out, self._in = bytearray(), bytearray()
        close_in_children(self)

    @classmethod
    def to(cls, handle: Handle) -> Connection:
        """Begin to connect.

        Raises:
            ConnectionRefusedError: The process has ended.
            OSError: There is no way to its host.
        """
        family = socket.AF_INET6 if ":" in handle.host else socket.AF_INET
        connection = cls(socket.socket(family, socket.SOCK_STREAM))
        code = connection.socket.connect_ex((handle.host, handle.port))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(code, os.strerror(code))  # of the class that belongs to the code
        return connection

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to send."""
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message after those before it; what the socket does not take, ``flush`` sends.

        Raises:
            OSError: The connection is broken.
        """
        data = json.dumps(message).encode()
        self._out += _HEAD.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes.

        Raises:
            OSError: The connection is broken.
        """
        try:
            while self._out:
                del self._out[: self.socket.send(self._out, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # it is still connecting
                raise

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if none has come. Call it until then.

        Raises:
            EOFError: The other end has closed the connection, and all messages have been returned.
            OSError: The connection is broken, or was refused.
            ValueError: What came is no message.
        """
        while (message := self._next()) is None:
            try:
                data = self.socket.recv(_READ_NBYTES)
            except BlockingIOError:
                return None
            if not data:
                raise EOFError
            self._in += data
        return message

    def _next(self) -> dict[str, Any] | None:
        if len(self._in) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._in)
        if length > _MOST_NBYTES:
            raise ValueError(f"a message of {length} bytes")
        end = _HEAD.size + length
        if len(self._in) < end:
            return None
        message = json.loads(bytes(self._in[_HEAD.size : end]))
        del self._in[:end]
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

    def close(self) -> None:
        """Close it; what has not been sent is lost."""
        self.socket.close()
