"""Connecting all ranks pairwise, and what happens when one dies, stops or is out of reach."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest

from sdp_plugins.core.errors import PeerLostError, RendezvousError, RendezvousTimeoutError
from sdp_plugins.core.rendezvous import (
    ANNOUNCEMENT_NBYTES,
    Links,
    bootstrap_client,
    bootstrap_root,
    mesh_peer,
    peer_process,
)
from sdp_plugins.core.rendezvous.announcement import RankAnnouncement
from sdp_plugins.core.rendezvous.mesh_connector import MeshConnector
from sdp_plugins.core.rendezvous.mesh_peer import MeshPeer
from tests.core.failing import NOTICE_S
from tests.core.rendezvous_cases import (
    connect_by,
    connected,
    env_exchange,
    error_of,
    file_exchange,
    hooked,
)
from tests.faults import die, wait_for_go
from tests.ranks import HANG_S, Start, run_ranks, start_ranks

# All goes well


def connect_repeatedly(rank: int, world: int, root: str) -> None:
    for turn in range(3):
        for exchange in (env_exchange(), file_exchange(root, rank, world, f"p{turn}")):
            pids, _ = connect_by(exchange, rank, world)
            assert len(set(pids)) == world


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_links(rank_pool: Any, world: int, root: str) -> None:
    rank_pool(world).run(connect_repeatedly, root)


def connect_once(rank: int, world: int) -> tuple[list[int], float]:
    return connect_by(env_exchange(), rank, world, timeout_s=1e8)  # the longest that settings allow


def test_pids_are_the_ranks(start_pooled: Start) -> None:
    with start_pooled(3, connect_once) as ranks:
        assert [result[0] for result in ranks.results()] == [[rank.pid for rank in ranks]] * 3


MANY = """
import json, os, sys, time
from sdp_plugins.core.rendezvous import EnvExchange
from sdp_plugins.core.topology import Topology
from tests.core.rendezvous_cases import connected

world, start = int(sys.argv[1]), time.monotonic() + 0.5
for rank in range(world):
    if os.fork() == 0:
        time.sleep(max(0.0, start - time.monotonic()))
        place = Topology(rank, world, rank, world, 0, sys.argv[2], "test")
        with connected(rank, world, EnvExchange(place, "g"), 150.0) as links:
            assert len({*links.sockets}) == world
        os._exit(0)
codes = [os.wait()[1] for _ in range(world)]
print(json.dumps(codes))
"""


def test_many_ranks() -> None:
    import json

    out = subprocess.run(
        [sys.executable, "-c", MANY, "64", os.urandom(8).hex()],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert json.loads(out.stdout) == [0] * 64, out.stderr


def talk_early(rank: int, world: int) -> bytes:
    """What a rank sends right after connecting stays for the peer's link, whenever it returns."""
    if rank == 0:  # slow between hearing DONE and returning: until something lies there
        finish = MeshConnector._links

        def finish_slowly(self: MeshConnector) -> Links:
            assert select.select([self._peers[1].incoming], [], [], 10)[0]
            return finish(self)

        MeshConnector._links = finish_slowly  # type: ignore[method-assign]
    with connected(rank, world, env_exchange()) as links:
        passed = os.memfd_create("passed")
        os.write(passed, b"content")
        with socket.socket(fileno=os.dup(links.sockets[1 - rank])) as sock:
            sock.sendmsg(
                [b"x" * 24],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed]))],
            )
            os.close(passed)
            sock.settimeout(HANG_S)
            data, fds, _, _ = socket.recv_fds(sock, 100, 4)
            assert len(fds) == 1
            content = os.pread(fds[0], 100, 0)
            os.close(fds[0])
    return data + content


def test_records_sent_at_once_are_not_swallowed() -> None:
    assert run_ranks(2, talk_early) == [b"x" * 24 + b"content"] * 2


# Ranks die or stop


def die_after_exchange(rank: int, world: int, victim: int) -> None:
    exchange: Any = env_exchange()
    if rank == victim:
        exchange = hooked(exchange, partial(die, "dying"))
    connect_by(exchange, rank, world, 30)


def die_after_calls(rank: int, world: int, victim: int) -> None:
    """Die when half of the peers have been called."""
    connect_to, calls = MeshPeer.connect, 0

    def last_connection(self: MeshPeer, me: RankAnnouncement, segment_fd: int) -> bool:
        nonlocal calls
        calls += 1
        if calls > (world - 1) // 2:
            die("dying")
        return connect_to(self, me, segment_fd)

    if rank == victim:
        MeshPeer.connect = last_connection  # type: ignore[method-assign]
    connect_by(env_exchange(), rank, world, 30)


def die_before_done(rank: int, world: int, victim: int) -> None:
    """Die when all have called each other."""
    if rank == victim:
        MeshPeer.send = lambda *args: die("dying")  # type: ignore[method-assign]
    connect_by(env_exchange(), rank, world, 30)


def die_behind_child(rank: int, world: int, victim: int) -> None:
    """Die in the middle while a forked child keeps all sockets open."""

    def fork_and_die(*args: Any) -> None:
        if os.fork() == 0:
            time.sleep(600)
        die("dying")

    if rank == victim:
        MeshPeer.send = fork_and_die  # type: ignore[assignment]
    connect_by(env_exchange(), rank, world, 30)


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize(
    "how", [die_after_exchange, die_after_calls, die_before_done, die_behind_child]
)
def test_killed_while_connecting(start_pooled: Start, how: Any, victim: int) -> None:
    with start_pooled(4, how, victim) as ranks:
        assert ranks[victim].heard() == "dying"
        died_at = time.monotonic()
        for rank in {0, 1, 2, 3} - {victim}:
            error = error_of(ranks, rank)
            assert isinstance(error, PeerLostError)
            assert error.ranks == (victim,)
            assert ranks[rank].outcome().ended_at - died_at < 1.0


def die_on_old_kernel(rank: int, world: int, victim: int, what: str) -> None:
    """Without SO_PEERPIDFD (before Linux 6.5), or with nothing but sockets (some sandboxes)."""
    if what == "no SO_PEERPIDFD":
        vars(peer_process)["_SO_PEERPIDFD"] = 9999
        die_behind_child(rank, world, victim)
    else:
        for module in (mesh_peer, bootstrap_root, bootstrap_client, peer_process):
            vars(module)["open_pidfd"] = lambda sock: -1
        die_before_done(rank, world, victim)


@pytest.mark.parametrize("what", ["no SO_PEERPIDFD", "no pidfd"])
def test_killed_on_old_kernel(what: str) -> None:
    with start_ranks(3, die_on_old_kernel, 1, what) as ranks:
        assert ranks[1].heard() == "dying"
        died_at = time.monotonic()
        for rank in (0, 2):
            error = error_of(ranks, rank)
            assert isinstance(error, PeerLostError)
            assert error.ranks == (1,)
            assert ranks[rank].outcome().ended_at - died_at < 1.0


def stop_after_exchange(rank: int, world: int, victim: int) -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    connect_by(hooked(env_exchange(), stop) if rank == victim else env_exchange(), rank, world, 1.5)


def stop_after_calls(rank: int, world: int, victim: int) -> None:
    """Stop when half of the peers have been called: the others wait for different things."""
    connect_to, calls = MeshPeer.connect, 0

    def last_connection(self: MeshPeer, me: RankAnnouncement, segment_fd: int) -> bool:
        nonlocal calls
        calls += 1
        if calls > (world - 1) // 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return connect_to(self, me, segment_fd)

    if rank == victim:
        MeshPeer.connect = last_connection  # type: ignore[method-assign]
    connect_by(env_exchange(), rank, world, 1.5)


@pytest.mark.parametrize("how", [stop_after_exchange, stop_after_calls])
@pytest.mark.parametrize("victim", [0, 2])
def test_stopped_rank_is_named(start_pooled: Start, how: Any, victim: int) -> None:
    with start_pooled(4, how, victim) as ranks:
        for rank in {0, 1, 2, 3} - {victim}:
            error = error_of(ranks, rank)
            assert isinstance(error, RendezvousTimeoutError)
            assert error.ranks == (victim,)
            assert f"rank {victim} did not connect in 1.5 s" in str(error)
            assert "stopped" in str(error)


def connect_until_interrupted(rank: int, world: int) -> float:
    try:
        connect_by(
            hooked(env_exchange(), wait_for_go) if rank == 1 else env_exchange(), rank, world, 30
        )
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("not interrupted")


def test_interrupt_ends_the_wait_at_once(start_pooled: Start) -> None:
    """The others see the interrupted rank as lost."""
    with start_pooled(3, connect_until_interrupted) as ranks:
        assert ranks[1].heard() == "waiting"
        ranks[0].until_asleep()
        interrupted_at = time.monotonic()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].result() - interrupted_at < NOTICE_S
        error = error_of(ranks, 2)
        assert isinstance(error, PeerLostError)
        assert error.ranks == (0,)


def connect_with_wrong_table(rank: int, world: int, what: str) -> None:
    def run(blob: bytes, timeout_s: float) -> list[bytes]:
        blobs = env_exchange()(blob, timeout_s)
        assert len(blob) == ANNOUNCEMENT_NBYTES
        return {
            "short": blobs[:-1],
            "swapped": blobs[::-1],
            "other group": [RankAnnouncement.new(r, world).pack() for r in range(world)],
            "nonsense": [b"x" * ANNOUNCEMENT_NBYTES] * world,
            "cut": [b[:-1] for b in blobs],
        }[what]

    connect_by(run, rank, world, 10)


@pytest.mark.parametrize("what", ["short", "swapped", "other group", "nonsense", "cut"])
def test_bad_exchange(start_pooled: Start, what: str) -> None:
    with start_pooled(2, connect_with_wrong_table, what) as ranks:
        for rank in range(2):
            error = error_of(ranks, rank)
            assert type(error) is RendezvousError
            assert "exchange" in str(error)
