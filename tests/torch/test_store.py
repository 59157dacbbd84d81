"""torch's stores as the core's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sdp_plugins.torch.store import TorchStore

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
        assert timeout_s <= time.monotonic() - begin < timeout_s + 1
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
