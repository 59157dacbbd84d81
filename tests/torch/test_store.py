"""torch's stores as the core's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sdp_plugins.core import Group
from sdp_plugins.core.errors import RendezvousTimeoutError
from sdp_plugins.torch.store import TorchStore
from tests.ranks import HANG_S

pytestmark = pytest.mark.may_leak("fds", reason="libuv, in a TCPStore, keeps a pipe for good")


def make(kind: str, directory: Path) -> Any:
    if kind == "file":
        return dist.FileStore(str(directory / "store"), 1)
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.HashStore() if kind == "hash" else dist.PrefixStore("p", dist.HashStore())


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TorchStore]:
    store = TorchStore(make(request.param, tmp_path))
    yield store
    del store._store  # ends a TCPStore's server


def test_any_bytes(ours: TorchStore) -> None:
    for value in (b"", b"\0\xff\x80", bytes(100_000)):
        ours.set(f"key{len(value)}", value)
        assert ours.get(f"key{len(value)}", 0) == value


def test_waiting(ours: TorchStore, capfd: pytest.CaptureFixture[str]) -> None:
    for timeout_s in (0, 0.3):
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="nothing"):
            ours.get("nothing", timeout_s)
        assert time.monotonic() - begin >= timeout_s
    assert capfd.readouterr() == ("", "")  # torch logs every time-out of its own waits


def test_parts_have_their_own_keys(ours: TorchStore) -> None:
    ours.under("a").set("key", b"1")
    ours.under("b").set("key", b"2")
    assert ours.under("a").get("key", 0) == b"1"


def test_every_group_has_its_own_keys(ours: TorchStore) -> None:
    for value in (b"1", b"2"):
        first, second = (TorchStore.of_new_group(ours._store, rank) for rank in range(2))
        with pytest.raises(TimeoutError):
            second.get("key", 0)  # what an earlier group wrote is not seen
        first.set("key", value)
        assert second.get("key", 0) == value


class StoppedStore:
    """A store whose process is stopped: its calls return when the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self, *_: Any) -> Any:
        self.over.wait(HANG_S)
        return True

    add = set = get = check = wait


@pytest.fixture
def stopped() -> Iterator[Any]:
    store = StoppedStore()
    yield store
    store.over.set()


CALLS: dict[str, Callable[[Any], Any]] = {
    "a new group": lambda store: TorchStore.of_new_group(store, 0, answer_s=0.3),
    "set": lambda store: TorchStore(store, answer_s=0.3).set("key", b""),
    "get": lambda store: TorchStore(store, answer_s=0.3).get("key", 0.4),
    "get at last": lambda store: TorchStore(store).get("key", 0.1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_does_not_answer(stopped: Any, call: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match=r"store did not answer in 0\..*Hint: "):
        CALLS[call](stopped)
    assert time.monotonic() - begin < HANG_S / 2


def test_a_group_over_a_store_that_does_not_answer(stopped: Any) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"^rendezvous: torch's store did not answer"):
        Group.from_store(TorchStore(stopped, answer_s=0.3), 0, 2, timeout_s=1.0)
