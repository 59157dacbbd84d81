"""The end of a default group whose rank 0 serves torch's store.

The store ends with rank 0's group. A rank that leaves before, and begins again at once, would meet
the old store and lose it; so rank 0 leaves first, if it comes soon.
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
"""How long others wait for rank 0 to leave, of which nobody knows whether it will."""
CLOSING_S = 0.1
"""How long a store takes to end after that; it goes on if the program keeps something of it."""
_LISTENS = "0A"


@dataclass(frozen=True)
class StoreShutdown:
    """How another rank than 0 leaves after that, which serves the store.

    Attributes:
        port: Where the store is served.
        sockets: Those that listen there, by number; none if it is on another node.
    """

    port: int
    sockets: frozenset[str]

    @classmethod
    def of(cls, store: Store) -> StoreShutdown | None:
        """For a default group that has met at `store`; None if no rank of it serves that."""
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        by_agent = environment().get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
        if by_agent or not isinstance(store, TCPStore):
            return None
        return cls(store.port, listening(store.port))

    def follow(self, group: Group, failed: bool) -> None:
        """Wait a moment for rank 0 to leave and its store to end, on the other ranks of its node.

        Those of other nodes do not see it. A group that has failed makes no difference: to begin
        anew is the remedy.

        Args:
            group: That this rank has closed.
            failed: Whether it had failed before.
        """
        if not self.sockets:
            return
        end = time.monotonic() + FOLLOW_S
        while 0 not in group.gone():
            if time.monotonic() > end:
                return
            time.sleep(0.0005)
        if not failed:  # else rank 0 may have failed, too, and not left
            end = time.monotonic() + CLOSING_S
        while self.sockets & listening(self.port) and time.monotonic() < end:
            time.sleep(0.001)


def listening(port: int) -> frozenset[str]:
    """The numbers of this host's sockets that listen at a TCP port.

    To connect would tell less, as rank 0 may serve a new store by then, and trouble that.
    """
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.append(inode)
    return frozenset(found)
