"""Live rendezvous with a rank that garbles what it sends: the honest one gets an error in time.

Both are threads of this process: what the liar's thread hands to the network can be changed.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest

from sdp_plugins.core import SdpError
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.rendezvous import bootstrap_client, bootstrap_root, mesh_peer
from sdp_plugins.core.rendezvous.bootstrap_address import listen, root_addresses
from sdp_plugins.core.rendezvous.bootstrap_client import join
from sdp_plugins.core.rendezvous.bootstrap_root import BootstrapRoot
from sdp_plugins.core.rendezvous.context import RendezvousContext
from sdp_plugins.core.rendezvous.deadline import Deadline
from tests.core.mutation import draws, mutated
from tests.core.rendezvous_cases import connected, no_fd_leak
from tests.ranks import HANG_S

TIMEOUT_S = 0.2
LIMIT_S = HANG_S / 2
"""Whoever waits longer does not look at its deadline."""
LIAR = "liar"
Rank = Callable[[int], Any]


def lying(send: Callable[..., Any], garble: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """`send`, whose arguments are garbled in the liar's thread."""

    def call(*args: Any) -> Any:
        return send(*garble(*args) if threading.current_thread().name == LIAR else args)

    return call


@contextmanager
def garbled(draw: random.Random) -> Iterator[None]:
    """What the liar's thread sends is changed, now and then; and the descriptors beside it."""

    def message(data: bytes) -> bytes:
        return mutated(data, draw) if draw.random() < 0.7 else data

    def packet(sock: Any, data: bytes, fd: int = -1) -> tuple[Any, ...]:
        return sock, message(data)[:30000], draw.choice((fd, fd, fd, -1, 0))

    modules = (mesh_peer, bootstrap_root, bootstrap_client)
    with ExitStack() as stack:
        for module in modules:
            lie = lying(module.send_message, packet)
            stack.enter_context(mock.patch.object(module, "send_message", lie))
        yield


def against_a_liar(run: Rank, liar: int, draw: random.Random) -> object:
    """What the honest one of two ranks gets: a result, or an error of ours."""

    def lie() -> None:
        with suppress(Exception):
            run(liar)

    thread = threading.Thread(target=lie, name=LIAR)
    began = time.monotonic()
    with garbled(draw):
        thread.start()
        try:
            return run(1 - liar)
        except SdpError as error:
            return error
        finally:
            took_s = time.monotonic() - began
            thread.join()
            assert took_s < LIMIT_S


def meet_at_root(addresses: list[bytes], rank: int) -> bool:
    context = RendezvousContext(rank, RankNames("fuzz", 2), Deadline(TIMEOUT_S))
    with context.raising_errors():
        if rank > 0:
            return len(join(addresses, b"blob", context)) == 2
        return len(BootstrapRoot(listen(addresses, context.deadline), context).gather(b"blob")) == 2


class Board:
    """An exchange of two threads.

    Args:
        liar: Which of them lies.
        garble: Changes what the liar puts up.
    """

    def __init__(self, liar: int, garble: Callable[[bytes], bytes] = bytes) -> None:
        self._liar, self._garble = liar, garble
        self._blobs: dict[int, bytes] = {}
        self._both = threading.Barrier(2)

    def meet(self, rank: int) -> bool:
        with connected(rank, 2, partial(self._exchange, rank), TIMEOUT_S, "fuzz") as links:
            return len(links.sockets) == 2

    def _exchange(self, rank: int, blob: bytes, timeout_s: float) -> list[bytes]:
        self._blobs[rank] = self._garble(blob) if rank == self._liar else blob
        self._both.wait(HANG_S)
        return [self._blobs[0], self._blobs[1]]


def check(run: Rank, liar: int, draw: random.Random) -> None:
    with no_fd_leak():
        result = against_a_liar(run, liar, draw)
    assert result is True or (isinstance(result, SdpError) and "Hint: " in str(result))


@pytest.mark.parametrize("liar", [0, 1])
def test_a_hub(liar: int) -> None:
    for draw in draws(f"bootstrap {liar}"):
        check(partial(meet_at_root, root_addresses(uuid.uuid4().hex, "fuzz")), liar, draw)


@pytest.mark.parametrize("liar", [0, 1])
def test_a_switchboard(liar: int) -> None:
    for draw in draws(f"switchboard {liar}"):
        check(Board(liar).meet, liar, draw)


@pytest.mark.parametrize("liar", [0, 1])
def test_an_exchange(liar: int) -> None:
    """The announcements themselves are garbled, as by a store that many write to."""
    for draw in draws(f"exchange {liar}"):
        check(Board(liar, partial(mutated, draw=draw)).meet, liar, draw)
