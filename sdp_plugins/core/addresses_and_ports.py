"""This host's own addresses and free ports."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
_DISCARD = 9  # a port; nothing is sent to it


def local_address(towards: str) -> str:
    """This host's address on its route to another one; sends nothing.

    Args:
        towards: The other host's name or address.

    Raises:
        OSError: The name has no address, or there is no route.
    """
    family, kind, _, _, target = socket.getaddrinfo(towards, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def free_port(host: str = LOOPBACK, port: int = 0) -> int:
    """A TCP port that was free a moment ago.

    Args:
        host: The address to listen on; empty: all of this host's.
        port: The port to try; 0: any.

    Raises:
        OSError: The port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found
