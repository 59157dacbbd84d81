"""The exchange through rank 0 beside strangers: who connects, and who takes its address."""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from sdp_plugins.core.errors import (
    RendezvousError,
)
from sdp_plugins.core.rendezvous.failure import Kind, RendezvousFailure
from sdp_plugins.core.rendezvous.messages import (
    MAX_NBYTES,
    VERSION,
    MessageKind,
    pack_message,
    receive_message,
)
from tests.core.rendezvous_cases import (
    addresses,
    blobs,
    error_of,
    exchange_after_go,
    exchange_only,
    exchange_only_but_one,
    hear,
    knock,
)
from tests.faults import NOBODY, acting_as, go, go_rank, needs_root, wait_for_go
from tests.ranks import Start

# Strangers


STRANGE = {
    "silent": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "oversized": pack_message(MessageKind.HELLO, b"x" * MAX_NBYTES),
    "short hello": pack_message(MessageKind.HELLO, b"x"),
    "not a hello": pack_message(MessageKind.TABLE),
    "unknown kind": struct.pack("<4sHH", b"SDPL", VERSION, 77),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strangers_disturb_nothing(start_pooled: Start, name: str) -> None:
    """Some hang up and some stay until the ranks are through."""
    with start_pooled(2, exchange_rank_0_first) as ranks, ExitStack() as strangers:
        for i in range(20):
            sock = strangers.enter_context(knock(addresses(ranks.environment)[0]))
            sock.setblocking(False)
            if STRANGE[name]:
                sock.send(STRANGE[name])
            if i % 2:
                sock.close()
        go_rank(ranks, 1)
        assert ranks.results() == [blobs(2)] * 2


def exchange_rank_0_first(rank: int, world: int) -> list[bytes]:
    if rank > 0:
        wait_for_go()
    return exchange_only(rank, world)


@needs_root
@pytest.mark.parametrize("name", ["silent", "garbage"])
def test_other_users_are_refused(start_pooled: Start, name: str) -> None:
    with start_pooled(2, exchange_rank_0_first) as ranks:
        address = addresses(ranks.environment)[0]
        with acting_as(NOBODY), closing(knock(address)) as sock:
            if STRANGE[name]:
                with suppress(BrokenPipeError):  # refused already
                    sock.send(STRANGE[name])
            kind, content = receive_message(sock).parse()
        assert kind is MessageKind.ABORT
        reason = RendezvousFailure.unpack(content)
        assert reason.kind is Kind.REFUSED
        assert f"runs as user {NOBODY}, rank 0 as 0" in reason.what
        go_rank(ranks, 1)
        assert ranks.results() == [blobs(2)] * 2


@needs_root
@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_address_taken_by_another_user(start_pooled: Start, kind: int) -> None:
    """Whoever knows the job's key can take the first address; there are more."""
    with start_pooled(2, exchange_after_go) as ranks, ExitStack() as squatters:
        with acting_as(NOBODY):
            for address in addresses(ranks.environment)[:2]:
                squatter = squatters.enter_context(socket.socket(socket.AF_UNIX, kind))
                squatter.bind(address)
                squatter.listen()
        go(ranks)
        assert ranks.results() == [blobs(2)] * 2


def test_address_taken_by_another_job_for_a_while(start_pooled: Start) -> None:
    with start_pooled(2, exchange_after_go) as ranks:
        address = addresses(ranks.environment)[0]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(address)
            other.listen()
            go_rank(ranks, 0)
            hear(ranks, 0)
            ranks[0].until_asleep()
        knock(address).close()
        go_rank(ranks, 1)
        assert ranks.results() == [blobs(2)] * 2


def exchange_rank_0_after_go(rank: int, world: int) -> Any:
    if rank == 0:
        wait_for_go()
    return exchange_only_but_one(rank, world, 1, 1.0)


def test_address_taken_by_another_job_for_ever(start_pooled: Start) -> None:
    with start_pooled(2, exchange_rank_0_after_go) as ranks:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(addresses(ranks.environment)[0])
            other.listen()
            assert ranks[0].heard() == "waiting"
            ranks[0].kill(signal.SIGUSR1)
            error = error_of(ranks, 0)
        assert isinstance(error, RendezvousError)
        assert f"pid {os.getpid()}" in str(error)
        assert "SDP_JOB_ID" in str(error)
        assert error.elapsed_s > 0.9
