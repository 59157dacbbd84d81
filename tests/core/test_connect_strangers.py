"""Connecting beside strangers, who send what no rank sends."""

from __future__ import annotations

import array
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from sdp_plugins.core.rendezvous import (
    ANNOUNCEMENT_NBYTES,
)
from sdp_plugins.core.rendezvous.announcement import Place, RankAnnouncement
from sdp_plugins.core.rendezvous.mesh_peer import Introduction
from sdp_plugins.core.rendezvous.messages import (
    MessageKind,
    pack_message,
)
from tests.core.rendezvous_cases import connect_by, env_exchange, hooked
from tests.faults import NOBODY, acting_as, wait_for_go
from tests.ranks import Ranks, Start

# Strangers


def connect_late(rank: int, world: int) -> tuple[list[int], float]:
    return connect_by(
        hooked(env_exchange(), wait_for_go) if rank == 1 else env_exchange(), rank, world, 20
    )


def listeners(ranks: Ranks) -> list[bytes]:
    """Where the ranks listen: anyone can see that."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    names = {f"socket:[{line[6]}]": line[-1] for line in lines if "@sdp_plugins-rank-" in line[-1]}
    found = []
    for fd in (fd for rank in ranks for fd in Path(f"/proc/{rank.pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # closed since it was listed
            found.append(names.get(os.readlink(fd)))
    return [b"\0" + name[1:].encode() for name in found if name]


def knock_at(address: bytes, data: bytes, fds: list[int]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    sock.connect(address)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    if data:
        with suppress(BrokenPipeError):  # refused already
            sock.sendmsg([data], rights)
    return sock


STRANGE = {
    "silent": b"",
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "huge": b"x" * 60_000,
    "unknown kind": b"SDPL" + b"\xff" * 4,
    "not an introduction": pack_message(MessageKind.DONE),
    "short introduction": pack_message(MessageKind.INTRODUCTION, b"x"),
    "wrong nonce": Introduction(1, bytes(16), bytes(16)).pack(),
    "unknown rank": Introduction(9, bytes(16), bytes(16)).pack(),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strangers_disturb_nothing(start_pooled: Start, name: str) -> None:
    """They knock at every rank, with descriptors in hand, while rank 1 is on its way."""
    with start_pooled(3, connect_late) as ranks:
        assert ranks[1].heard() == "waiting"
        strangers, targets = [], listeners(ranks)
        for uid in {os.geteuid(), NOBODY if os.geteuid() == 0 else os.geteuid()}:
            with acting_as(uid):
                for address in targets:
                    for fds in ([], [0], [0] * 8, [0] * 50):
                        strangers.append(knock_at(address, STRANGE[name], fds))
        assert len(strangers) >= 12
        ranks[1].kill(signal.SIGUSR1)
        assert [result[0] for result in ranks.results()] == [[rank.pid for rank in ranks]] * 3
        for sock in strangers:
            sock.close()


# Announcements


def test_announcements() -> None:
    mine = RankAnnouncement.new(3, 4)
    assert len(mine.pack()) == ANNOUNCEMENT_NBYTES
    assert RankAnnouncement.unpack(mine.pack()) == mine
    assert mine.place == Place.here()
    assert len({RankAnnouncement.new(0, 1).token for _ in range(10)}) == 10
    long = RankAnnouncement(
        0, 1, 2, 3, bytes(16), bytes(range(16)), Place("b" * 36, 2**63, "h" * 64)
    )
    assert RankAnnouncement.unpack(long.pack()) == long
    for wrong in (b"", mine.pack()[:-1], mine.pack() + b"x", b"\xff" * ANNOUNCEMENT_NBYTES):
        with pytest.raises(ValueError):
            RankAnnouncement.unpack(wrong)
    with pytest.raises(ValueError, match="version 9"):
        RankAnnouncement.unpack(mine.pack()[:4] + b"\x09\0" + mine.pack()[6:])
