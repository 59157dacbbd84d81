"""A store of torch's for ranks that have met."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from sdp_plugins.core import PeerLostError, RendezvousTimeoutError
from sdp_plugins.core.regroup import Meeting
from sdp_plugins.torch.store import answer

CONNECT_S = 10.0


def store_of(meeting: Meeting, host: str, timeout_s: float) -> dist.Store:
    """Make a store on rank 0, and connect the others to it; a collective.

    Args:
        meeting: The ranks.
        host: The address of this rank's host.
        timeout_s: Of the exchange of the address.
    """
    limit = timedelta(seconds=min(CONNECT_S, timeout_s))
    store: dist.Store
    if meeting.rank == 0:
        store = dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)
        meeting(f"{host} {store.port}".encode(), timeout_s)
        return store
    there, port = meeting(b"", timeout_s)[0].decode().split()
    return _connected(partial(dist.TCPStore, there, int(port), None, False, limit), meeting)


def _connected(connect: Callable[[], dist.Store], meeting: Meeting) -> dist.Store:
    """Connect to the store of rank 0, which may end meanwhile: torch would try for seconds."""
    try:
        return answer(connect, 2 * CONNECT_S, meeting.check)
    except (dist.DistError, RendezvousTimeoutError) as error:
        raise PeerLostError(f"rank 0's store does not answer: {error}", ranks=[0]) from error
