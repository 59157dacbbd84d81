"""What names mean here, found although a name server may not answer."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Iterable

RESOLVE_S = 5.0


def addresses_of(names: Iterable[str]) -> dict[str, str]:
    """Hosts' addresses, found within `RESOLVE_S`; empty for those that have none."""
    found: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def look(name: str) -> None:
        try:
            info = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found.put((name, ""))
        else:
            found.put((name, str(min(info, key=lambda one: one[0] != socket.AF_INET)[4][0])))

    known = dict.fromkeys(names, "")
    for name in known:
        threading.Thread(target=look, args=[name], daemon=True).start()
    end = time.monotonic() + RESOLVE_S
    for _ in range(len(known)):
        try:
            name, address = found.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        known[name] = address
    return known


def is_loopback(address: str) -> bool:
    """Whether an address is that of a machine itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
