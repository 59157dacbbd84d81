"""The shutdown of a default group whose rank 0 serves torch's store.

The store ends with rank 0's group. A rank that leaves earlier and joins again immediately would
connect to the old store and lose it. The other ranks therefore wait briefly for rank 0 to leave.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from sdp_plugins.core import Group
from sdp_plugins.core.environment import environment

FOLLOW_S = 1.0
"""How long other ranks wait for rank 0 to leave; it may never do so."""
CLOSING_S = 0.1
"""How long a store takes to end after that; it continues if the program keeps a reference."""
_LISTENS = "0A"


@dataclass(frozen=True)
class StoreShutdown:
    """Delays shutdown until rank 0, which serves the store, has left.

    Attributes:
        port: The port of the store.
        sockets: The sockets that listen there, by number; empty if the store is on another node.
    """

    port: int
    sockets: frozenset[str]

    @classmethod
    def of(cls, store: Store) -> StoreShutdown | None:
        """Return the shutdown of a default group that met at `store`; None if no rank serves it."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        by_agent = environment().get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
        if by_agent or not isinstance(store, TCPStore):
            return None
        return cls(store.port, listening(store.port))

    def follow(self, group: Group, failed: bool) -> None:
        """On rank 0's node, wait briefly for rank 0 to leave the closed group and its store to end.

        Ranks on other nodes cannot observe it. A group that had failed waits as well, because its
        user is likely to create a new one.
        """
        if not self.sockets:
            return
        end = time.monotonic() + FOLLOW_S
        while 0 not in group.gone():
            if time.monotonic() > end:
                return
            time.sleep(0.0005)
        if not failed:  # otherwise rank 0 may have failed, too, and not left
            end = time.monotonic() + CLOSING_S
        while self.sockets & listening(self.port) and time.monotonic() < end:
            time.sleep(0.001)


def listening(port: int) -> frozenset[str]:
    """Return the numbers of this host's sockets that listen on a TCP port.

    Connecting would tell less, as rank 0 may already serve a new store, and would disturb that
    store.
    """
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.append(inode)
    return frozenset(found)
