"""Whatever bytes a peer sends at the rendezvous, or between nodes: an error of ours, in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest

from sdp_plugins.core.internode.failure_message import FAILURE_MESSAGE_NBYTES, FailureMessage
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.rendezvous.announcement import RankAnnouncement
from sdp_plugins.core.rendezvous.bootstrap_messages import Hello, unpack_table
from sdp_plugins.core.rendezvous.context import RendezvousContext
from sdp_plugins.core.rendezvous.deadline import Deadline
from sdp_plugins.core.rendezvous.failure import RendezvousFailure
from sdp_plugins.core.rendezvous.mesh_peer import Introduction
from sdp_plugins.core.rendezvous.messages import (
    MessageKind,
    Packet,
    pack_message,
)
from tests.core.mutation import draws, mutated, mutated_json, read

WORLD = 3
NAMES = RankNames("fuzz", WORLD)


class NeverError(Exception):
    """What nobody may raise."""


TABLE = b"\1\0\0\0a" + b"\0\0\0\0" + b"\3\0\0\0ccc"
FAILURE = RendezvousFailure.lost("rank 2 (pid 17) ended", [2])


def read_hello(data: bytes) -> object:
    """As the bootstrap root does."""
    _, content = Packet(data).parse()
    return Hello.unpack(content)


def read_failure(data: bytes) -> object:
    """As a rank that is told of it; the error can be shown, too."""
    failure = RendezvousFailure.unpack(data)
    return str(RendezvousContext(0, NAMES, Deadline(1.0)).error(failure))


READERS: dict[str, tuple[bytes, Callable[[bytes], object], type[Exception]]] = {
    "announcement": (RankAnnouncement.new(1, WORLD).pack(), RankAnnouncement.unpack, ValueError),
    "failure": (FAILURE.pack(), read_failure, ValueError),
    "introduction": (
        Introduction(1, b"n" * 16, b"m" * 16).pack(),
        lambda data: Packet(data).parse(),
        ValueError,
    ),
    "content of an introduction": (
        Introduction(1, b"n" * 16, b"m" * 16).pack()[8:],
        Introduction.unpack,
        ValueError,
    ),
    "message": (
        pack_message(MessageKind.ABORT, FAILURE.pack()),
        lambda data: Packet(data).parse(),
        ValueError,
    ),
    "hello": (Hello(1, WORLD, 5.0, 4.0, b"a blob").pack(), read_hello, ValueError),
    "table": (TABLE, lambda data: unpack_table(data, WORLD), ValueError),
}


@pytest.mark.parametrize("what", READERS)
def test_readers_refuse_in_their_own_way(what: str) -> None:
    message, reader, allowed = READERS[what]
    for draw in draws(what):
        read(mutated(message, draw), reader, allowed)


def test_a_failure_message_never_raises() -> None:
    said = FailureMessage(1, "timeout", (1, 2), "rank 2 did not come")
    message, fields = said.pack(), asdict(said)
    for draw in draws("failure"):
        data = mutated(message, draw) if draw.random() < 0.5 else mutated_json(fields, draw)
        found = read(
            data[:FAILURE_MESSAGE_NBYTES].ljust(FAILURE_MESSAGE_NBYTES),
            FailureMessage.unpack,
            NeverError,
        )
        assert isinstance(found, FailureMessage)
        assert found.text.encode()  # it goes on into messages
