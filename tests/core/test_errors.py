"""Errors keep what they know on their way between processes."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sdp_plugins.core import errors
from sdp_plugins.core.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
    RendezvousTimeoutError,
    SdpError,
    SharedMemoryError,
    from_native,
    name_error,
)
from sdp_plugins.core.rank_names import name_ranks
from tests.ranks import HANG_S

CLASSES = [
    SdpError,
    PeerLostError,
    CollectiveTimeoutError,
    CollectiveMismatchError,
    SharedMemoryError,
    RendezvousError,
    RendezvousTimeoutError,
]


def fields(error: SdpError) -> tuple[object, ...]:
    return (str(error), error.args, error.ranks, error.op, error.seq, error.elapsed_s)


def example(cls: type[SdpError]) -> SdpError:
    return cls("text. Hint: do it.", ranks=(5, 2), op="all_reduce", seq=1042, elapsed_s=1.5)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(cls: type[SdpError], protocol: int) -> None:
    error = example(cls)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert fields(again) == fields(error)
    assert again.ranks == (2, 5)


@pytest.mark.parametrize("cls", CLASSES)
def test_copy(cls: type[SdpError]) -> None:
    error = example(cls)
    for again in (copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert fields(again) == fields(error)


def raise_example() -> None:
    raise example(PeerLostError)


def test_through_multiprocessing() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(PeerLostError, match="Hint: do it") as caught:
            pool.apply(raise_example)
        pool.close()
        pool.join()
    assert fields(caught.value) == fields(example(PeerLostError))


def test_defaults_say_nothing() -> None:
    assert fields(SdpError("x")) == ("x", ("x",), (), "", errors.NO_SEQ, 0.0)
    assert SdpError("x").kind == "other"
    assert SdpError("x", kind="closed").kind == "closed"
    assert PeerLostError("x").kind == "peer_lost"


NATIVE = {
    "text": "what happened",
    "summary": "what",
    "cause": "it broke",
    "ranks": [3, 1],
    "op": "broadcast",
    "seq": 7,
    "elapsed_s": 2.5,
    "origin_rank": 2,
    "is_repeat": True,
    "global_ranks": [7, 9],
    "global_origin_rank": 8,
    "operation": None,
    "origin_operation": None,
}


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("peer_lost", PeerLostError),
        ("aborted", PeerLostError),
        ("timeout", CollectiveTimeoutError),
        ("mismatch", CollectiveMismatchError),
        ("shared_memory", SharedMemoryError),
        ("closed", SdpError),
        ("a kind of a later version", SdpError),
    ],
)
def test_from_native(kind: str, cls: type[SdpError]) -> None:
    failure = SimpleNamespace(**NATIVE, kind=kind)
    error = from_native(failure)  # type: ignore[arg-type]
    assert type(error) is cls and error.kind == kind
    assert (error.cause, error.origin_rank, error.is_repeat) == ("it broke", 2, True)
    assert (error.global_ranks, error.global_origin_rank) == ((7, 9), 8)
    assert fields(error) == ("what happened", ("what happened",), (1, 3), "broadcast", 7, 2.5)


def test_a_rendezvous_timeout_is_both() -> None:
    assert issubclass(RendezvousTimeoutError, RendezvousError)
    assert issubclass(RendezvousTimeoutError, CollectiveTimeoutError)


@pytest.mark.parametrize("cls", CLASSES)
def test_docstrings_say_when_and_what_to_do(cls: type[SdpError]) -> None:
    text = inspect.getdoc(cls) or ""
    assert text.startswith(("Raised when", "Raised on all ranks when"))
    assert "Remedy:" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks (none)"),
        ([3], "rank 3"),
        ([6, 5], "ranks 5, 6"),
        ([1, 2, 3], "ranks 1-3"),
        ([9, 1, 2, 4, 5, 6, 1], "ranks 1, 2, 4-6, 9"),
        (range(1, 64), "ranks 1-63"),
    ],
)
def test_name_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


@pytest.mark.parametrize("module", ["config", "errors", "topology", "rendezvous", "error_file"])
def test_module_alone_is_light(module: str) -> None:
    """A launcher reads settings and places; that must not load numpy or native code."""
    heavy = {"numpy", "torch", "sdp_plugins.core._native"}
    code = f"import sys, sdp_plugins.core.{module}; print({heavy!r} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert out.stdout.strip() == "set()", out.stderr


def test_the_cause_alone_is_passed_on() -> None:
    hint = " (last completed: barrier #1). Hint: raise the time-out."
    text = "[rank 1 in group dp (ranks 1, 3)] all_reduce #7 float32[5] sum: rank 3 did not arrive"
    error = CollectiveTimeoutError(text + hint)
    error.summary = text
    assert name_error(error) == f"CollectiveTimeoutError: {text}"
    cut = name_error(KeyError("x" * 1000))
    assert len(cut) == 400 and cut.endswith("xxx...")
