"""Names, addresses and interfaces: of this machine, and towards other nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.doctor.addresses import RESOLVE_S, addresses_of, is_loopback
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

_UP = ("up", "unknown")  # unknown: of loopback and tunnels


def loopback(machine: Machine) -> Iterator[Finding]:
    """Ranks of this machine reach MASTER_ADDR=127.0.0.1."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=RESOLVE_S).close()
    except OSError as failed:
        yield error(
            f"{LOOPBACK} cannot be reached ({failed}), where torch's ranks meet",
            "ip link set lo up",
        )
    else:
        yield ok(f"{LOOPBACK} can be reached")


def host_name(machine: Machine) -> Iterator[Finding]:
    """This host's name is not that of its loopback, if there are other hosts."""
    if len(machine.hosts) < 2 and not _spans_nodes(machine):
        yield skipped("the job has one host")
        return
    name = socket.gethostname()
    address = addresses_of([name])[name]
    if not address or is_loopback(address):
        what = f"means {address}" if address else "has no address"
        yield warning(
            f"this host's name, {name}, {what}, but torchrun and gloo tell other hosts to use it",
            f"give {name} its address in /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE",
        )
    else:
        yield ok(f"{name} is {address}")


def _spans_nodes(machine: Machine) -> bool:
    return machine.place is not None and machine.place.local_size < machine.place.world_size


def master_address(machine: Machine) -> Iterator[Finding]:
    """MASTER_ADDR, if it is set, is an address, and one that other hosts reach."""
    name = machine.environment.get("MASTER_ADDR", "")
    address = addresses_of([name])[name] if name else ""
    if not name:
        yield skipped("MASTER_ADDR is not set")
    elif not address:
        yield error(f"MASTER_ADDR={name} has no address here", f"check `getent hosts {name}`")
    elif is_loopback(address) and _spans_nodes(machine):  # sdp run --hosts sets its own
        yield error(
            f"MASTER_ADDR={name} is this machine's loopback, which other hosts cannot reach",
            "export MASTER_ADDR=ADDRESS_OF_THE_FIRST_HOST",
        )
    else:
        yield ok(f"MASTER_ADDR={name} is {address}")


def gloo_interface(machine: Machine) -> Iterator[Finding]:
    """The interfaces that GLOO_SOCKET_IFNAME names exist and are up."""
    given = machine.environment.get("GLOO_SOCKET_IFNAME", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    there = sorted(path.name for path in (machine.root / "sys/class/net").glob("*"))
    choice = f"unset GLOO_SOCKET_IFNAME, or name one of {', '.join(there)}"
    if not names:
        yield skipped("GLOO_SOCKET_IFNAME is not set")
    elif missing := [name for name in names if name not in there]:
        yield error(f"GLOO_SOCKET_IFNAME names {missing[0]}, which is no interface here", choice)
    elif down := [n for n in names if machine.text(f"sys/class/net/{n}/operstate") not in _UP]:
        yield error(f"the interface {down[0]} of GLOO_SOCKET_IFNAME is down", choice)
    else:
        yield ok(f"gloo uses {', '.join(names)}")


def peer_names(machine: Machine) -> Iterator[Finding]:
    """Each host of the job has an address here."""
    if len(machine.hosts) < 2:
        yield skipped("the job has one host")
        return
    missing = [host for host, address in machine.addresses.items() if not address]
    if missing:
        yield error(
            f"{socket.gethostname()} finds no address for {', '.join(missing)}",
            f"add {missing[0]} to /etc/hosts or the name server; check `getent hosts {missing[0]}`",
        )
    else:
        yield ok(f"{socket.gethostname()} finds all {len(machine.hosts)} hosts")
