"""The exchange through rank 0 of a job, and everything that can be in its way."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from sdp_plugins.core.errors import (
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
)
from sdp_plugins.core.rendezvous import (
    EnvExchange,
    bootstrap_address,
    bootstrap_client,
    bootstrap_root,
    messages,
    peer_process,
)
from sdp_plugins.core.rendezvous.bootstrap_address import root_addresses
from sdp_plugins.core.rendezvous.bootstrap_messages import (
    MAX_BLOB_NBYTES,
)
from sdp_plugins.core.topology import Topology
from tests.core.failing import NOTICE_S
from tests.core.rendezvous_cases import (
    addresses,
    blobs,
    env_exchange,
    error_of,
    exchange_after_go,
    exchange_only,
    exchange_only_but_one,
    hear,
    knock,
    no_fd_leak,
    until_connected,
)
from tests.faults import go, wait_for_go
from tests.ranks import HANG_S, Start, say, start_ranks

# All goes well


def exchange_sizes(rank: int, world: int) -> None:
    for turn, nbytes in enumerate((0, 1, 7, 256, 5000, MAX_BLOB_NBYTES)):
        mine = [bytes([r, turn]) * (nbytes // 2) + b"x" * (nbytes % 2) for r in range(world)]
        with no_fd_leak():
            assert env_exchange()(mine[rank], 30) == mine


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_table_in_rank_order(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(exchange_sizes)


def exchange_through_small_buffers(rank: int, world: int, enlarge: bool) -> list[bytes]:
    """As if net.core.wmem_default were small, and net.core.wmem_max too if not ``enlarge``."""

    def accepted(*args: Any) -> Any:
        for sock, peer in peer_process.accepted(*args):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            yield sock, peer

    def find(*args: Any) -> Any:
        sock, why = bootstrap_address.find(*args)
        if sock is not None and enlarge:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock, why

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap_root, "accepted", accepted)
        patch.setattr(bootstrap_client, "find", find)
        if not enlarge:
            patch.setattr(messages, "_enlarge", lambda sock, data: False)
        return env_exchange()(bytes([rank]) * MAX_BLOB_NBYTES, 30)


def test_small_socket_buffers(start_pooled: Start) -> None:
    with start_pooled(2, exchange_through_small_buffers, True) as ranks:
        for rank in range(2):
            assert ranks[rank].result(HANG_S) == [bytes([r]) * MAX_BLOB_NBYTES for r in range(2)]
    with start_pooled(2, exchange_through_small_buffers, False) as ranks:
        for rank in range(2):
            error = error_of(ranks, rank)
            assert isinstance(error, RendezvousError)
            assert "Message too long" in str(error) and "net.core.wmem_max" in str(error)


def exchange_again_and_again(rank: int, world: int) -> None:
    exchange = env_exchange()
    for turn in range(50):
        assert exchange(b"%d %d" % (turn, rank), 10) == [b"%d %d" % (turn, r) for r in range(world)]
        assert env_exchange()(b"%d" % turn, 10) == [b"%d" % turn] * world


def test_same_name_again_at_once(rank_pool: Any) -> None:
    rank_pool(3).run(exchange_again_and_again)


def exchange_two_names(rank: int, world: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}

    def run(name: str) -> None:
        found[name] = EnvExchange(Topology.from_env(), name)(f"{name} {rank}".encode(), 10)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b", "a/b", "ä")]
    for thread in threads if rank % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_groups_at_the_same_time(rank_pool: Any) -> None:
    names = ("a", "b", "a/b", "ä")
    expected = {name: [f"{name} {rank}".encode() for rank in range(2)] for name in names}
    assert rank_pool(2).run(exchange_two_names) == [expected] * 2


def test_jobs_at_the_same_time() -> None:
    with start_ranks(2, exchange_only) as first, start_ranks(2, exchange_only) as second:
        assert first.results() == second.results() == [blobs(2)] * 2


def exchange_late(rank: int, world: int, late: tuple[int, ...]) -> tuple[list[bytes], float]:
    if rank in late:
        wait_for_go()
    start = time.monotonic()
    return exchange_only(rank, world), time.monotonic() - start


@pytest.mark.parametrize("late", [(0,), (2,), (1, 2)])
def test_any_rank_last(start_pooled: Start, late: tuple[int, ...]) -> None:
    with start_pooled(3, exchange_late, late) as ranks:
        for rank in ranks:
            assert rank.heard() == ("waiting" if rank.rank in late else "here")
            rank.until_asleep()
        for rank_late in late:
            ranks[rank_late].kill(signal.SIGUSR1)
        results = ranks.results()
    assert [result[0] for result in results] == [blobs(3)] * 3
    assert all(results[rank][1] < 1.0 for rank in late), "nobody waits once all are there"


def test_one_rank_needs_nothing() -> None:
    topology = Topology(0, 1, 0, 1, 0, "key", "test")
    with no_fd_leak():
        assert EnvExchange(topology, "g")(b"mine", 0.0) == [b"mine"]


def test_blob_too_long() -> None:
    topology = Topology(0, 2, 0, 2, 0, "key", "test")
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        EnvExchange(topology, "g")(b"x" * (MAX_BLOB_NBYTES + 1), 1.0)


# Ranks die, stop or never come


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_after_hello(start_pooled: Start, victim: int) -> None:
    """Rank 1 has not come yet; the others hear at once of the one that will never be back."""
    with start_pooled(4, exchange_only_but_one, 1) as ranks:
        survivors = {0, 2, 3} - {victim}
        until_connected(ranks, 2)
        killed_at = time.monotonic()
        ranks[victim].kill()
        for rank in survivors:
            error = error_of(ranks, rank)
            assert isinstance(error, PeerLostError)
            assert error.ranks == (victim,)
            assert ranks[rank].outcome().ended_at - killed_at < 1.0


def exchange_with_child(rank: int, world: int) -> Any:
    """Wait for a rank that does not come, while a forked child holds copies of all sockets."""

    def fork_later() -> None:
        wait_for_go()
        if os.fork() == 0:
            time.sleep(600)
        say("forked")

    if rank == 1:
        time.sleep(600)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # in both threads
    threading.Thread(target=fork_later, daemon=True).start()
    return env_exchange()(b"", 30)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_while_a_forked_child_holds_the_sockets(victim: int) -> None:
    with start_ranks(3, exchange_with_child) as ranks:
        survivor = 2 - victim
        until_connected(ranks, 1)
        for rank in (0, 2):
            assert ranks[rank].heard() == "waiting"
            ranks[rank].kill(signal.SIGUSR1)
            assert ranks[rank].heard() == "forked"
        killed_at = time.monotonic()
        ranks[victim].kill()
        error = error_of(ranks, survivor)
        assert isinstance(error, PeerLostError)
        assert error.ranks == (victim,)
        assert ranks[survivor].outcome().ended_at - killed_at < 1.0


def fork_sleeper() -> None:
    if os.fork() == 0:
        time.sleep(600)


def exchange_after_fork(rank: int, world: int) -> list[bytes]:
    """A child forked in the first exchange holds the root's address when the second begins."""
    if rank == 1:
        time.sleep(0.5)
        env_exchange()(b"", 10)
        return env_exchange()(b"1", 10)
    timer = threading.Timer(0.2, fork_sleeper)
    timer.start()
    env_exchange()(b"", 10)
    timer.join()
    return env_exchange()(b"0", 10)


def test_fork_does_not_keep_the_address() -> None:
    with start_ranks(2, exchange_after_fork) as ranks:
        assert ranks.results() == [[b"0", b"1"]] * 2


def test_address_held_by_the_child_of_a_dead_hub() -> None:
    """The predecessor was killed while it listened, and a forked child keeps its socket open."""
    with (
        start_ranks(2, exchange_after_go) as ranks,
        orphaned_listener(addresses(ranks.environment)[0]),
    ):
        go(ranks)
        assert ranks.results() == [blobs(2)] * 2


@contextmanager
def orphaned_listener(address: bytes) -> Iterator[None]:
    """A listening socket whose process has ended and whose child has not."""
    wait_end, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen()
        if os.fork() == 0:
            os.read(wait_end, 1)
        os._exit(0)
    os.close(wait_end)
    os.waitpid(child, 0)
    yield
    os.close(end)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_deadline_names_who_never_came(start_pooled: Start, number: int) -> None:
    with start_pooled(4, exchange_only_but_one, 2, 1.5) as ranks:
        hear(ranks, 2)
        ranks[2].kill(number)
        for rank in (0, 1, 3):
            error = error_of(ranks, rank)
            assert isinstance(error, RendezvousTimeoutError)
            assert error.ranks == (2,)
            assert "rank 2 did not arrive in 1.5 s" in str(error)
            assert "SDP_JOB_ID" in str(error)
            assert error.elapsed_s > 1.0


def test_deadline_names_rank_0(start_pooled: Start) -> None:
    with start_pooled(3, exchange_only_but_one, 0, 1.0) as ranks:
        for rank in (1, 2):
            error = error_of(ranks, rank)
            assert isinstance(error, RendezvousTimeoutError)
            assert error.ranks == (0,)
            assert "rank 0 did not arrive in 1 s (nobody listens)" in str(error)


def test_stopped_hub_is_named(start_pooled: Start) -> None:
    with start_pooled(3, exchange_only_but_one, 2, 1.5) as ranks:
        until_connected(ranks, 1)
        ranks[0].kill(signal.SIGSTOP)
        error = error_of(ranks, 1)
        assert isinstance(error, RendezvousTimeoutError)
        assert error.ranks == (0,)
        assert "rank 0 did not answer" in str(error)


def exchange_with_own_timeout(rank: int, world: int) -> Any:
    return exchange_only_but_one(rank, world, 3, 1.0 if rank == 1 else 30.0)


def test_earliest_deadline_ends_it_for_all(start_pooled: Start) -> None:
    with start_pooled(4, exchange_with_own_timeout) as ranks:
        for rank in (0, 1, 2):
            error = error_of(ranks, rank)
            assert isinstance(error, RendezvousTimeoutError)
            assert error.ranks == (3,)
            assert error.elapsed_s < NOTICE_S


def exchange_until_interrupted(rank: int, world: int, alone: int) -> float:
    if rank != alone:
        time.sleep(600)
    say("here")
    interrupted_at = 0.0
    with no_fd_leak():  # around it all: a socket just made may belong to the exception's frames
        try:
            env_exchange()(b"", 30)
        except KeyboardInterrupt:
            interrupted_at = time.monotonic()
    assert interrupted_at, "not interrupted"
    return interrupted_at


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupt_ends_the_wait_at_once(start_pooled: Start, rank: int) -> None:
    with start_pooled(2, exchange_until_interrupted, rank) as ranks:
        hear(ranks, rank)
        ranks[rank].until_asleep()
        interrupted_at = time.monotonic()
        ranks[rank].kill(signal.SIGINT)
        assert ranks[rank].result() - interrupted_at < NOTICE_S


# Ranks that must not come together


def exchange_as(rank: int, world: int, claims: dict[int, tuple[int, int]]) -> Any:
    """Claim another rank and world size than one has, after all others have come."""
    if rank in claims:
        wait_for_go()
        rank, world = claims[rank]
    topology = Topology(rank, world, 0, 1, 0, Topology.from_env().job_key, "test")
    with no_fd_leak():
        return EnvExchange(topology, "g")(b"", 20)


@pytest.mark.parametrize(
    ("claims", "ranks_named", "text"),
    [
        ({2: (2, 4)}, (2,), r"rank 2 \(pid \d+\) was started with world size 4, rank 0 with 3"),
        ({2: (1, 3)}, (1,), r"processes \d+ and \d+ both claim rank 1"),
        ({2: (3, 3)}, (), r"process \d+ claims rank 3 of 3"),
    ],
    ids=["world size", "duplicate rank", "rank out of range"],
)
def test_false_claims_fail_on_all(
    start_pooled: Start, claims: Any, ranks_named: Any, text: str
) -> None:
    with start_pooled(3, exchange_as, claims) as ranks:
        assert ranks[2].heard() == "waiting"
        until_connected(ranks, 1)
        ranks[2].kill(signal.SIGUSR1)
        for rank in ranks:
            error = rank.outcome().error
            assert type(error) is RendezvousError
            assert error.ranks == ranks_named
            with pytest.raises(RendezvousError, match=text + ".*SDP_JOB_ID"):
                raise error


def test_other_version_fails_on_all(start_pooled: Start) -> None:
    with start_pooled(2, exchange_only_but_one, 1) as ranks:
        hear(ranks, 0)
        with closing(knock(addresses(ranks.environment)[0])) as sock:
            sock.send(struct.pack("<4sHH", b"SDPL", 999, 4) + b"abcd")
            error = error_of(ranks, 0)
            assert type(error) is RendezvousError
            assert "version 999" in str(error)
            assert "same version of sdp_plugins" in str(error)


def test_addresses_differ() -> None:
    found = [
        *root_addresses("k", "n"),
        *root_addresses("k", "m"),
        *root_addresses("kn", ""),
        *root_addresses("k" * 5000, "\ud800" * 5000),
    ]
    assert len(set(found)) == len(found)
    assert all(address[0] == 0 and len(address) <= 108 for address in found)
