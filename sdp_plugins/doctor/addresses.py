"""What names mean here, found although a name server may not answer."""

from __future__ import annotations

import ipaddress
import queue
import threading
import time
from collections.abc import Iterable

from sdp_plugins.launch.hosts import LaunchError
from sdp_plugins.launch.hosts.addresses import resolve

RESOLVE_S = 5.0


def addresses_of(names: Iterable[str]) -> dict[str, str]:
    """Hosts' addresses, found within `RESOLVE_S`; empty for those that have none."""
    found: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def look(name: str) -> None:
        try:
            found.put((name, resolve(name)))
        except (LaunchError, UnicodeError):
            found.put((name, ""))

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
