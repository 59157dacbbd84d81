"""Messages of the exchange through rank 0, as bytes."""

from __future__ import annotations

import pytest

from sdp_plugins.core.rendezvous.bootstrap_messages import (
    MAX_BLOB_NBYTES,
    Hello,
    pack_table,
    unpack_table,
)
from sdp_plugins.core.rendezvous.failure import Kind, Reason
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
    "reason",
    [
        Reason(Kind.LOST, (3, 5), "what", "hint"),
        Reason(Kind.REFUSED, (), "", ""),
        Reason(Kind.MISSING, tuple(range(1000)), "ä" * 1000, "h" * 2000),
    ],
)
def test_reasons(reason: Reason) -> None:
    assert Reason.unpack(reason.pack()) == reason
    for wrong in (b"", reason.pack()[:-1] or b"x", reason.pack() + b"x", b"\xff" * 20):
        with pytest.raises(ValueError):
            Reason.unpack(wrong)


def test_long_reasons_are_cut() -> None:
    reason = Reason(Kind.MISSING, tuple(range(10_000)), "w" * 9000, "h" * 9000)
    again = Reason.unpack(reason.pack())
    assert again.ranks == reason.ranks[: len(again.ranks)]
    assert len(again.ranks) >= 1000
    assert len(reason.pack()) < 32 * 1024
