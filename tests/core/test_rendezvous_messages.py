"""Messages of the exchange through rank 0, as bytes."""

from __future__ import annotations

import pytest

from sdp_plugins.core.rendezvous.bootstrap_messages import (
    MAX_BLOB_NBYTES,
    Hello,
    pack_table,
    unpack_table,
)
from sdp_plugins.core.rendezvous.failure import Kind, RendezvousFailure
from sdp_plugins.core.rendezvous.messages import (
    MessageKind,
    Packet,
)

# Messages


def test_hellos() -> None:
    hello = Hello(1, 2, 3.5, 3.25, b"blob")
    kind, content = Packet(hello.pack()).parse()
    assert kind is MessageKind.HELLO
    assert Hello.unpack(content) == hello


@pytest.mark.parametrize(
    "table", [[], [b""], [b"a", b"", b"ccc"], [b"x" * MAX_BLOB_NBYTES] * 3], ids=len
)
def test_tables(table: list[bytes]) -> None:
    content = b"".join(Packet(part).parse()[1] for part in pack_table(table))
    assert unpack_table(content, len(table)) == table
    for wrong in (content[:-1], content + b"x", content + b"\0\0\0\0"):
        if wrong != content:
            with pytest.raises(ValueError):
                unpack_table(wrong, len(table))


@pytest.mark.parametrize(
    "failure",
    [
        RendezvousFailure(Kind.LOST, "what", "hint", (3, 5)),
        RendezvousFailure(Kind.REFUSED, "", ""),
        RendezvousFailure(Kind.MISSING, "ä" * 1000, "h" * 2000, range(1000)),
    ],
)
def test_failures(failure: RendezvousFailure) -> None:
    assert vars(RendezvousFailure.unpack(failure.pack())) == vars(failure)
    for wrong in (b"", failure.pack()[:-1] or b"x", failure.pack() + b"x", b"\xff" * 20):
        with pytest.raises(ValueError):
            RendezvousFailure.unpack(wrong)


def test_long_failures_are_cut() -> None:
    failure = RendezvousFailure(Kind.MISSING, "w" * 9000, "h" * 9000, range(10_000))
    again = RendezvousFailure.unpack(failure.pack())
    assert again.ranks == failure.ranks[: len(again.ranks)]
    assert len(again.ranks) >= 1000
    assert len(failure.pack()) < 32 * 1024
