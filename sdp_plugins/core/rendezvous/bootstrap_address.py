"""The address at which rank 0 of a group listens.

It is in the abstract namespace: no file, nothing left behind, private to the network namespace. It
is derived from user, job and group, so any process can take it first. Hence there are several
candidates, of which dead and foreign ones are skipped.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from enum import Enum

from .deadline import Deadline
from .failure import RendezvousFailure
from .peer_process import close_listener, credentials, has_ended

_CANDIDATES = 4
BACKLOG = 4096
_RETRY_S = 0.02
_BIND_TO_LISTEN_S = 0.005


class Holder(Enum):
    """The process that holds an address."""

    NOBODY = "nobody that answers"
    BUSY = "somebody whose backlog is full"
    FOREIGN = "a process of another user"
    DEAD = "a process that has ended, kept by a forked child"
    OTHER = "another program, or another version of sdp_plugins"
    OURS = "a live process of our user"


def root_addresses(job_key: str, name: str) -> list[bytes]:
    """Return the addresses that rank 0 of a group may listen on, best first."""
    uid = os.geteuid()
    digest = hashlib.sha256(f"{uid}\0{job_key}\0{name}".encode(errors="replace")).hexdigest()
    return [f"\0sdp_plugins-{uid}-{digest[:40]}-{i}".encode() for i in range(_CANDIDATES)]


def listen(addresses: list[bytes], deadline: Deadline) -> socket.socket:
    """Listen on the first free address; waits while another live process of this user has one.

    Raises:
        RendezvousFailure: It did not end before the deadline.
    """
    while True:
        holder = ""
        for address in addresses:
            listener = _bind(address)
            if listener is not None:
                return listener
            who, holder = _holder(address)
            if who in (Holder.OURS, Holder.BUSY):
                break  # ranks would find that process first, so another address is useless
        if deadline.expired:
            raise RendezvousFailure.refused(
                f"the address of rank 0 was held by {holder} for {deadline.allowed}",
                "another job with the same id is starting on this host: give each its own "
                "SDP_JOB_ID",
            )
        time.sleep(min(_RETRY_S, deadline.remaining_s))


def find(addresses: list[bytes]) -> tuple[socket.socket | None, str]:
    """Connect to rank 0, once, without waiting.

    Returns:
        The connection (non-blocking), or None and a clause that describes what was found.
    """
    found = "nobody listens"
    for address in addresses:
        sock, who = _probe(address)
        if who is Holder.OURS and sock is not None:
            return sock, ""
        if who is Holder.OTHER:
            found = f"the address is held by {who.value}"
        if sock is not None:
            if who is Holder.FOREIGN:
                found = f"the address is held by {_describe(sock, who)}"
            sock.close()
    return None, found


def _bind(address: bytes) -> socket.socket | None:
    """Return a listening socket (non-blocking); None if the address is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException as error:
        close_listener(listener)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _holder(address: bytes) -> tuple[Holder, str]:
    sock, who = _probe(address)
    if who is Holder.NOBODY:
        time.sleep(_BIND_TO_LISTEN_S)  # a process may be between bind and listen
        sock, who = _probe(address)
    if sock is None:
        return who, who.value
    with sock:
        return who, _describe(sock, who)


def _describe(sock: socket.socket, who: Holder) -> str:
    peer = credentials(sock)
    return f"{who.value} (pid {peer.pid}, uid {peer.uid})"


def _probe(address: bytes) -> tuple[socket.socket | None, Holder]:
    """Connect and look who is there; the caller closes the socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(address)
        if not credentials(sock).is_ours:
            return sock, Holder.FOREIGN
        return sock, Holder.DEAD if has_ended(sock) else Holder.OURS
    except BlockingIOError:
        sock.close()
        return None, Holder.BUSY
    except (ConnectionRefusedError, ConnectionResetError):
        sock.close()
        return None, Holder.NOBODY
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EPROTOTYPE:
            return None, Holder.OTHER
        raise
