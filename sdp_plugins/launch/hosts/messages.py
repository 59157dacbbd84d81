"""Messages between the launcher and the agents: a kind, a length, and so many bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

TOKEN = "SDP_LAUNCH_TOKEN"
"""The variable by which agents know the word that makes them this job's."""

# From an agent.
HELLO = b"H"  # JSON: who it is
STARTED = b"S"  # JSON: the rank's process
STDOUT, STDERR = b"O", b"E"
EXIT = b"X"  # JSON: the exit code, and what is in the error file
REFUSED = b"R"  # text: why it cannot start its rank
# From the launcher.
START = b"P"  # JSON: what was not known before
SIGNAL = b"K"  # JSON: a signal's number

_HEAD = struct.Struct(">cI")
LONGEST = 1 << 24
LONGEST_OF_STRANGERS = 1 << 12  # of who has not said the token yet
# A host that is switched off says no word: after so long its connections count as broken.
_IDLE_S, _INTERVAL_S, _PROBES = 20, 5, 4


def message(kind: bytes, body: bytes | object = b"") -> bytes:
    """One message; what is not bytes becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _HEAD.pack(kind, len(data)) + data


class Inbox:
    """Bytes that come in pieces, cut into messages again."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.longest = LONGEST_OF_STRANGERS

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The messages, kind and body, that `data` completes.

        Raises:
            ValueError: This is somebody else's language.
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
    """What `message` made into JSON."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("brackets in brackets without end") from None


def keep_alive(link: socket.socket) -> None:
    """Have the kernel notice the loss of the other host, and send small messages at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
