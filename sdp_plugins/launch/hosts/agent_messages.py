"""Messages between the launcher and its agents: a kind, a length, and a body of that length."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

TOKEN = "SDP_LAUNCH_TOKEN"
"""The variable with the token by which agents prove that they belong to this job."""

# From an agent.
HELLO = b"H"  # JSON: token, rank and host
STARTED = b"S"  # JSON: the rank's process
STDOUT, STDERR = b"O", b"E"
EXIT = b"X"  # JSON: the exit code and the content of the error file
REFUSED = b"R"  # text: why it cannot start its rank
ROSTER = b"M"  # JSON, to and from: who is in the latest group of an elastic job
# From the launcher.
START = b"P"  # JSON: the rank's command line, and variables for it; again when it has ended
SIGNAL = b"K"  # JSON: a signal's number

_HEAD = struct.Struct(">cI")
LONGEST = 1 << 24
LONGEST_HELLO = 1 << 12  # anybody can connect
# A host that loses power sends nothing: these keep-alive settings detect it.
_IDLE_S, _INTERVAL_S, _PROBES = 20, 5, 4


def message(kind: bytes, body: bytes | object = b"") -> bytes:
    """Make a message; a body that is not bytes is encoded as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _HEAD.pack(kind, len(data)) + data


class Inbox:
    """Reassembles messages from a stream of bytes.

    Args:
        longest: Limit for the bytes of a body.
    """

    def __init__(self, longest: int) -> None:
        self._data = bytearray()
        self.longest = longest

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind and body of each message that `data` completes.

        Raises:
            ValueError: The data are not of this protocol.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            kind, nbytes = _HEAD.unpack_from(self._data)
            if nbytes > self.longest:
                raise ValueError(f"a message of {nbytes} bytes")
            end = _HEAD.size + nbytes
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEAD.size : end])
            del self._data[:end]
            yield kind, body


def read_json(body: bytes) -> Any:
    """Decode a JSON body."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def keep_alive(link: socket.socket) -> None:
    """Set keep-alive, to detect the loss of the other host, and send small messages at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
