"""Exchange through a store that somebody brings."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sdp_plugins.core.errors import RendezvousError, RendezvousTimeoutError
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.rendezvous import StoreExchange
from tests.core.rendezvous_cases import FileStore, file_exchange


def exchange_three_times(rank: int, world: int, root: str) -> list[list[bytes]]:
    exchange = file_exchange(root, rank, world)
    return [exchange(b"%d %d" % (turn, rank), 10) for turn in range(3)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_turn_has_its_own_keys(rank_pool: Any, world: int, root: str) -> None:
    expected = [[b"%d %d" % (turn, rank) for rank in range(world)] for turn in range(3)]
    assert rank_pool(world).run(exchange_three_times, root) == [expected] * world


def test_deadline_names_all_who_did_not_publish(root: str) -> None:
    for rank in (1, 3):
        FileStore(root).set(f"p/0/{rank}", b"")
    start = time.monotonic()
    with pytest.raises(
        RendezvousTimeoutError, match=r"ranks 2, 4 did not arrive in 0.5 s"
    ) as caught:
        file_exchange(root, 0, 5)(b"", 0.5)
    assert caught.value.ranks == (2, 4)
    assert time.monotonic() - start > 0.4
    assert str(caught.value).startswith("[rank 0/5 in group p] rendezvous: ")


class BrokenStore(FileStore):
    def set(self, key: str, value: bytes) -> None:
        raise ConnectionResetError("the server is gone")


class BreakingStore(FileStore):
    def get(self, key: str, timeout_s: float) -> bytes:
        raise RuntimeError("the server is gone")


@pytest.mark.parametrize("store", [BrokenStore, BreakingStore])
def test_a_failing_store_is_named(store: type[FileStore], root: str) -> None:
    with pytest.raises(RendezvousError, match=r"the store failed.*the server is gone") as caught:
        StoreExchange(store(root), "p", 0, RankNames("p", 2))(b"", 5)
    assert not isinstance(caught.value, RendezvousTimeoutError)
    assert caught.value.__cause__ is not None


def test_an_interrupt_goes_through(root: str) -> None:
    class Interrupted(FileStore):
        def get(self, key: str, timeout_s: float) -> bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StoreExchange(Interrupted(root), "p", 0, RankNames("p", 2))(b"", 5)
