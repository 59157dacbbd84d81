"""What the tests of rendezvous run in ranks and put in their way."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sdp_plugins.core.errors import (
    NO_SEQ,
    SdpError,
)
from sdp_plugins.core.rank_names import DEFAULT, RankNames
from sdp_plugins.core.rendezvous import (
    EnvExchange,
    Exchange,
    Links,
    StoreExchange,
    meet,
)
from sdp_plugins.core.rendezvous.bootstrap_address import root_addresses
from sdp_plugins.core.rendezvous.context import DOCTOR
from sdp_plugins.core.topology import Topology
from tests.faults import wait_for_go
from tests.ranks import HANG_S, Ranks, say


class FileStore:
    """A store in a directory: what the tests use where a framework would bring its own."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def set(self, key: str, value: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.root, delete=False) as file:
            file.write(value)
        os.chmod(file.name, 0o644)
        os.rename(file.name, self.root / key.replace("/", "_"))

    def get(self, key: str, timeout_s: float) -> bytes:
        end = time.monotonic() + timeout_s
        while True:
            with suppress(FileNotFoundError):
                return (self.root / key.replace("/", "_")).read_bytes()
            if time.monotonic() >= end:
                raise TimeoutError(key)
            time.sleep(0.002)


def fds() -> dict[str, str]:
    """This process's descriptors, less the one that lists them."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


@contextmanager
def no_fd_leak() -> Iterator[None]:
    """Fail if the block leaves descriptors behind, however it ends."""
    gc.collect()  # what an earlier case of this process has dropped
    before = fds()
    try:
        yield
    finally:
        left = fds().items() - before.items()  # what an earlier case had may still go
        assert not left, f"left over: {sorted(left)}"


def env_exchange(name: str = "g") -> EnvExchange:
    """The exchange of this rank's job, as a group makes it."""
    return EnvExchange(Topology.from_env(), name)


def addresses(env: dict[str, str], name: str = "g") -> list[bytes]:
    """The bootstrap root's addresses of a job that the test has started."""
    return root_addresses(Topology.from_env({**env, "RANK": "0"}).job_key, name)


def until_connected(ranks: Ranks, n: int) -> None:
    """In the test: wait until n ranks have connected to rank 0 and all have nothing to do."""
    name = addresses(ranks.environment)[0][1:].decode()
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if name in line]
        if len(lines) > n:  # the accepted sockets and the listening one bear the name
            for rank in reversed(ranks.ranks):
                rank.until_asleep()  # rank 0 last: the others have said hello by then
            return
        time.sleep(0.005)
    raise AssertionError("the ranks did not connect")


def segment(rank: int) -> int:
    """A memfd that holds the rank."""
    fd = os.memfd_create("segment")
    os.write(fd, str(rank).encode())
    return fd


@contextmanager
def connected(
    rank: int, world: int, exchange: Exchange, timeout_s: float = 10.0, name: str = DEFAULT
) -> Iterator[Links]:
    """Meet the ranks of a group on one node, and connect with all."""
    own = segment(rank)
    try:
        with meet(rank, RankNames(name, world), exchange, timeout_s) as rendezvous:
            links = rendezvous.connect(own, range(world))
    except BaseException:
        os.close(own)  # still ours
        raise
    try:
        yield links
    finally:
        for fd in (*links.segment_fds, *links.sockets, *links.pidfds):
            if fd >= 0:
                os.close(fd)


def check_links(links: Links, rank: int, world: int) -> None:
    """Check every descriptor of a result, and that all pairs can talk."""
    assert [os.pread(fd, 9, 0).decode() for fd in links.segment_fds] == [*map(str, range(world))]
    assert links.sockets[rank] == links.pidfds[rank] == -1
    kept = [fd for fd in (*links.segment_fds, *links.sockets, *links.pidfds) if fd >= 0]
    assert len(set(kept)) == 3 * world - 2
    assert not any(os.get_inheritable(fd) for fd in kept)
    peers = [peer for peer in range(world) if peer != rank]
    assert not any(os.get_blocking(links.sockets[peer]) for peer in peers)
    for peer in peers:
        assert os.readlink(f"/proc/self/fd/{links.pidfds[peer]}") == "anon_inode:[pidfd]"
        os.write(links.sockets[peer], b"%d to %d" % (rank, peer))
    for peer in peers:
        with socket.socket(fileno=os.dup(links.sockets[peer])) as sock:
            assert (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(HANG_S)
            assert sock.recv(100) == b"%d to %d" % (peer, rank)


def exchange_only(rank: int, world: int, timeout_s: float = 10.0) -> list[bytes]:
    """Take part in an exchange; says when it begins."""
    say("here")
    with no_fd_leak():
        return env_exchange()(b"blob %d" % rank, timeout_s)


def connect_by(
    exchange: Exchange, rank: int, world: int, timeout_s: float = 10.0
) -> tuple[list[int], float]:
    """Connect, check everything, close; returns the pids and how long it took."""
    with no_fd_leak():
        start = time.monotonic()
        with connected(rank, world, exchange, timeout_s, "g") as links:
            took_s = time.monotonic() - start
            check_links(links, rank, world)
            pids = [os.getpid() if fd < 0 else pid_of(fd) for fd in links.pidfds]
    return pids, took_s


def pid_of(pidfd: int) -> int:
    """The process of a pidfd."""
    fields = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(field.split()[1]) for field in fields if field.startswith("Pid:"))


def hooked(exchange: Exchange, then: Callable[[], None]) -> Exchange:
    """An exchange after which something happens."""

    def run(blob: bytes, timeout_s: float) -> list[bytes]:
        blobs = exchange(blob, timeout_s)
        then()
        return blobs

    return run


def file_exchange(root: str, rank: int, world: int, prefix: str = "p") -> StoreExchange:
    """An exchange that needs no socket."""
    return StoreExchange(FileStore(root), prefix, rank, RankNames(prefix, world))


def blobs(world: int) -> list[bytes]:
    return [b"blob %d" % rank for rank in range(world)]


def hear(ranks: Ranks, *which: int) -> None:
    for rank in which:
        assert ranks[rank].heard() == "here"


def error_of(ranks: Ranks, rank: int) -> SdpError:
    """The error that a rank raised, checked for what every error of a rendezvous has."""
    error = ranks[rank].outcome().error
    assert isinstance(error, SdpError), ranks[rank].outcome(0)
    assert str(error).startswith(f"[rank {rank}/{len(ranks)} in group g] rendezvous: "), error
    assert ". Hint: " in str(error) and str(error).endswith(DOCTOR)
    assert "\n" not in str(error)
    assert (error.op, error.seq) == ("rendezvous", NO_SEQ)
    return error


def exchange_only_but_one(rank: int, world: int, absent: int, timeout_s: float = 30.0) -> Any:
    if rank == absent:
        say("here")
        time.sleep(600)
    return exchange_only(rank, world, timeout_s)


def exchange_after_go(rank: int, world: int) -> list[bytes]:
    wait_for_go()
    return exchange_only(rank, world)


def knock(address: bytes) -> socket.socket:
    """Connect as soon as somebody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(HANG_S)
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        try:
            sock.connect(address)
            return sock
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError("nobody listens")
