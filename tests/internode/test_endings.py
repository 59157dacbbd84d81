"""However an operation across nodes ends: who waits is told why."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core import Group, PeerLostError, SdpError
from sdp_plugins.core import _native as native
from sdp_plugins.core.errors import name_error
from sdp_plugins.core.internode import spanning_group
from sdp_plugins.core.internode.failure_message import (
    FAILURE_MESSAGE_NBYTES,
    FailureMessage,
    native_failure,
)
from sdp_plugins.core.internode.operation import SpanningOperation
from sdp_plugins.torch.gloo_channel import GlooChannel
from tests.internode.spanning import meet
from tests.ranks import Start

LIMIT_S = 1.0
WAIT_S = 60.0
"""Of a caller that would wait for ever."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def fail_with(error: BaseException) -> Any:
    return mock.Mock(side_effect=error)


# ---- failure messages ----------------------------------------------------------------------------

TEXTS = {
    "nothing": "",
    "ASCII": "the data set is empty",
    "too long": "x" * 2000,
    "emoji": "\N{COLLISION SYMBOL}" * 600,
    "mixed": "a\N{EURO SIGN}\N{COLLISION SYMBOL}" * 200,
    "quotes": '"\\' * 600,
    "control characters": "\0\x1b\n" * 200,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("rank", [0, 10**6])
def test_a_failure_message_has_its_size_whatever_its_text(text: str, rank: int) -> None:
    sent = FailureMessage(rank, "shared_memory", tuple(range(rank, rank + 8)), text)
    packed = sent.pack()
    assert len(packed) == FAILURE_MESSAGE_NBYTES
    found = FailureMessage.unpack(packed)
    assert (found.rank, found.kind, found.ranks) == (sent.rank, sent.kind, sent.ranks)
    assert text.startswith(found.text)
    # As much of it as there is room for: less than one more character is left.
    assert found.text == text or len(packed.rstrip()) > FAILURE_MESSAGE_NBYTES - 8


def test_what_cannot_be_encoded_is_replaced() -> None:
    error = SdpError("bad name \udcff")
    context = SimpleNamespace(rank=3, global_ranks=[])
    assert (
        FailureMessage.unpack(FailureMessage.of(error, context).pack()).text == "bad name \\udcff"
    )  # type: ignore[arg-type]
    work = native.Work()
    work.fail(native_failure(error))
    assert str(work.failure()) == "bad name \\udcff"


def operation_of_rank_0() -> SpanningOperation:
    nodes = SimpleNamespace(world_size=2, name=lambda ranks: f"rank {ranks[0]} on node1")
    context = SimpleNamespace(
        rank=0,
        nodes=nodes,
        last_completed=None,
        native=SimpleNamespace(error_prefix="[rank 0/2] "),
        global_ranks=[],
        channels={},
    )
    request = native.Request(native.Op.barrier, native.DType.uint8, (), (), 1.0)
    return SpanningOperation(context, request, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "who", "ranks"),
    [
        (
            FailureMessage(1, "timeout", (1,), "x" * 500).pack()[:300],
            "rank 1 on node1 gave up: ",
            (1,),
        ),
        (b'{"rank": 1, "kind": 7, "ranks": 5}', "rank 1 on node1 gave up: ", (1,)),
        (b"\xff\xfe", "a rank of another node gave up: ", ()),
        (b"[]", "a rank of another node gave up: ", ()),
        (b"", "a rank of another node gave up: ", ()),
        (
            FailureMessage(7, "timeout", (1, 7), "late").pack(),
            "a rank of another node gave up: late",
            (1,),
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_all_the_same(
    data: bytes, who: str, ranks: tuple[int, ...]
) -> None:
    error = operation_of_rank_0().repeated_error(FailureMessage.unpack(data))
    assert who in str(error)
    assert error.ranks == ranks


# ---- a failure while others are told -------------------------------------------------------------


def fail_badly(rank: int, world: int, root: str, how: str) -> list[str]:
    """Rank 1 does not come; and what rank 0 does then fails as well."""
    with meet("2x1", root, "g") as group:
        data = np.ones(1000, np.float32)
        group.all_reduce(data)
        group.timeout_s = LIMIT_S
        if rank == 1:
            time.sleep(WAIT_S)
            return []
        patches: dict[str, Any] = {
            "tell": mock.patch.object(
                GlooChannel, "send_failure", fail_with(RuntimeError("MPI_ERR"))
            ),
            "pack": mock.patch.object(FailureMessage, "pack", fail_with(TypeError("no message"))),
            "abandon": mock.patch.object(GlooChannel, "abandon", fail_with(RuntimeError("MPI_E"))),
            "text": mock.patch.object(GlooChannel, "wait", fail_with(UnspeakableError())),
            "surrogate": mock.patch.object(GlooChannel, "wait", fail_with(OSError("x \udcff"))),
        }
        with patches[how]:
            works = [group.all_reduce(data, async_op=True) for _ in range(3)]
            works.append(group.recv(data, 1, async_op=True))
            return [how_it_ends(work) for work in works] + [how_it_goes_on(group)]


def how_it_ends(work: Any) -> str:
    try:
        work.wait(WAIT_S)
    except SdpError as error:
        return f"{type(error).__name__} {error}"
    return "done"


def how_it_goes_on(group: Group) -> str:
    try:
        group.barrier(timeout_s=WAIT_S)
    except SdpError as error:
        return f"{type(error).__name__} {error}"
    return "done"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("tell", "CollectiveTimeoutError .*rank 1 on node1 did not answer"),
        ("pack", "CollectiveTimeoutError .*rank 1 on node1 did not answer"),
        ("abandon", "CollectiveTimeoutError .*rank 1 on node1 did not answer"),
        ("text", r"(SdpError|PeerLostError) .*UnspeakableError: \(its text cannot be shown\)"),
        ("surrogate", r"(SdpError|PeerLostError) .*OSError: x \\udcff"),
    ],
)
def test_all_that_wait_hear_of_the_first_cause(
    start_pooled: Start, tmp_path: Path, how: str, text: str
) -> None:
    with start_pooled(2, fail_badly, str(tmp_path), how) as ranks:
        found = ranks[0].result(WAIT_S)
        assert len(found) == 5
        for ending in found:
            assert re.match(text, ending), ending


def finish_badly(rank: int, world: int, root: str) -> str:
    cannot_end = mock.patch.object(SpanningOperation, "end", fail_with(OSError("at the end")))
    with meet("2x1", root, "g") as group, cannot_end:
        return how_it_ends(group.all_reduce(np.ones(1000, np.float32), async_op=True))


def test_an_operation_that_cannot_be_finished_fails(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, finish_badly, str(tmp_path)) as ranks:
        for rank in ranks:
            assert "OSError: at the end" in rank.result(WAIT_S)


def leave_with_a_name_that_is_no_text(rank: int, world: int, root: str) -> str:
    group = meet("2x1", root, "g")
    group.barrier()
    if rank == 1:  # as the interpreter does when a program ends with an uncaught exception
        error = ValueError("bad name \udcff")
        only_this = mock.patch.object(spanning_group, "_open", {group.issuer.endpoint})
        with only_this, mock.patch.object(sys, "last_value", error, create=True):
            spanning_group._close_all()
        return ""
    return how_it_goes_on(group)


def test_an_uncaught_exception_is_told_whatever_its_text(
    start_pooled: Start, tmp_path: Path
) -> None:
    with start_pooled(2, leave_with_a_name_that_is_no_text, str(tmp_path)) as ranks:
        found = ranks[0].result(WAIT_S)
        assert "rank 1 on node1 gave up: ValueError: bad name \\udcff" in found


def raise_emoji(rank: int, world: int, root: str) -> None:
    with meet("2x1", root, "g") as group:
        if rank == 1:
            raise KeyError("\N{COLLISION SYMBOL}" * 180)
        group.barrier()


def test_a_text_of_emoji_is_told(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, raise_emoji, str(tmp_path)) as ranks:
        error = ranks[0].outcome(WAIT_S).error
        assert isinstance(error, PeerLostError)
        told = name_error(KeyError("\N{COLLISION SYMBOL}" * 180))
        assert f"gave up: {told}" in str(error)


# ---- memory --------------------------------------------------------------------------------------


def disagree(rank: int, world: int, root: str, what: str) -> tuple[bool, str]:
    """Rank 1 calls something else; whether the output is as it was, and what is raised."""
    with meet("2x2", root, "g") as group:
        output, mine = np.zeros(400), np.full(100 - 4 * (rank == 1), 7.0)
        calls: dict[str, Callable[[], Any]] = {
            "size": lambda: group.broadcast(output[: 4 * mine.size], 0),
            "root": lambda: group.broadcast(output, rank % 2),
            "operation": lambda: (
                group.reduce(output, 0) if rank == 1 else group.broadcast(output, 0)
            ),
            "uneven": lambda: group.all_gather_uneven(outputs, mine),
        }
        outputs = np.split(output, 4)
        outputs[rank] = outputs[rank][: mine.size]
        if rank == 0:
            output[:] = 7.0
        before = output.copy()
        try:
            calls[what]()
            group.barrier()
        except SdpError as error:
            return np.array_equal(output, before), type(error).__name__
        return False, "done"


@pytest.mark.parametrize("what", ["size", "root", "operation", "uneven"])
def test_what_a_mismatch_leaves(start_pooled: Start, tmp_path: Path, what: str) -> None:
    with start_pooled(4, disagree, str(tmp_path), what) as ranks:
        found = [rank.result(WAIT_S) for rank in ranks]
    assert {kind for _, kind in found} == {"CollectiveMismatchError"}
    assert what == "uneven" or all(as_it_was for as_it_was, _ in found)
