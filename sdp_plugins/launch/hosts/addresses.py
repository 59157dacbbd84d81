"""Addresses by which hosts reach each other."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from sdp_plugins.core.addresses_and_ports import LOOPBACK, local_address
from sdp_plugins.launch.hosts import LaunchError


def resolve(name: str) -> str:
    """A host's address.

    Raises:
        LaunchError: The name has none.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(
            f"there is no host {name!r}: its name has no address here ({reason}). Hint: check the "
            f"spelling, and the output of `getent hosts {name}`."
        ) from None
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def ours_towards(address: str) -> str:
    """The address of this machine that the host with `address` sees."""
    try:
        return local_address(address)
    except OSError:
        return LOOPBACK


def launchers(addresses: Sequence[str]) -> list[str]:
    """The addresses of this machine that the hosts with `addresses` see."""
    others = [address for address in addresses if not is_here(address)]
    return list(dict.fromkeys(map(ours_towards, others))) or [LOOPBACK]


def master_address(addresses: Sequence[str]) -> str:
    """The first address as the other hosts see it: this machine has one per network."""
    first = addresses[0]
    others = [address for address in addresses if not is_here(address)]
    if not others:
        return LOOPBACK
    return ours_towards(others[0]) if is_here(first) else first


def peer(connection: socket.socket) -> str:
    """The address from which a connection comes."""
    address = str(connection.getpeername()[0])
    return address.removeprefix("::ffff:")  # an IPv4 address on a dual-stack socket
