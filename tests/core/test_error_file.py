"""The exception that ends a rank, as its launcher reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from sdp_plugins.core import CollectiveTimeoutError, Group, PeerLostError, SdpError
from sdp_plugins.core.error_file import ErrorFile, RankError, _write
from tests.ranks import HANG_S


def lost() -> PeerLostError:
    return PeerLostError("rank 1 ended", ranks=[1], op="all_reduce", seq=7)


class Bare(SdpError):
    """Its `__init__` does not call that of the base."""

    def __init__(self, code: int) -> None:
        self.code = code


def chained(inner: BaseException, outer: Exception, *, cause: bool) -> Exception:
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from (error if cause else None)
    except Exception as error:
        return error


def in_handler(inner: BaseException, outer: Exception) -> Exception:
    try:
        try:
            raise inner
        except BaseException:
            raise outer  # noqa: B904
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "exception"),
        (ValueError("not a PeerLostError: never raised"), "exception"),
        (lost(), "peer_lost"),
        (CollectiveTimeoutError("x"), "timeout"),
        (RuntimeError(f"PeerLostError: {lost()}"), "peer_lost"),  # as C++ passes it on
        (RuntimeError(f"sdp_plugins.core.errors.PeerLostError: {lost()}\n\nAt:"), "peer_lost"),
        (RuntimeError("PeerLostError: the database connection"), "exception"),  # a program's own
        (RuntimeError("SdpError: never raised"), "exception"),
        (RuntimeError("SdpError"), "exception"),
        (chained(lost(), KeyError(1), cause=True), "peer_lost"),
        (chained(lost(), KeyError(1), cause=False), "exception"),
        (in_handler(lost(), KeyError(1)), "peer_lost"),
        (Bare(3), "other"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert RankError.of(error).kind == kind


def test_fields() -> None:
    told = RankError.parse(
        json.loads(json.dumps(asdict(RankError.of(in_handler(lost(), KeyError(1))))))
    )
    assert told is not None and told.is_loss
    assert (told.ranks, told.op, told.seq) == ((1,), "all_reduce", 7)
    assert "PeerLostError: rank 1 ended" in "\n".join(told.traceback)
    assert told.traceback[-1] == "KeyError: 1"


def test_a_long_text_is_cut() -> None:
    file = ErrorFile()
    try:
        _write(file.path, in_handler(lost(), ValueError("\0" * 2**22)))
        told = RankError.parse(file.read())
    finally:
        file.close()
    assert told is not None and told.is_loss
    assert told.traceback[-1].startswith("ValueError: \0")


def test_fields_of_an_error_that_has_passed_through_cpp() -> None:
    with Group.from_env(name="passed through C++", timeout_s=30) as group:
        group.abort("no reason")
        failure = group.failure
        assert isinstance(failure, PeerLostError)
        known = RankError.of(RuntimeError(f"PeerLostError: {failure}\n\nAt:\n  a frame"))
        assert (known.kind, known.ranks, known.origin_rank) == ("aborted", (0,), 0)
        other = RankError.of(RuntimeError("PeerLostError: [rank 0/2] something else"))
        assert (other.kind, other.ranks) == ("exception", ())
    assert RankError.of(RuntimeError(f"PeerLostError: {failure}")).ranks == (0,)  # closed


@pytest.mark.parametrize(
    "data", [None, {}, {"kind": "x"}, {**asdict(RankError.of(lost())), "ranks": ["a"]}]
)
def test_what_is_no_error_is_none(data: dict[str, Any] | None) -> None:
    assert RankError.parse(data) is None


SCRIPT = """
import os, subprocess, sys
from sdp_plugins.core.error_file import write_uncaught
write_uncaught()
write_uncaught()
assert "SDP_ERROR_FILE" not in os.environ
if os.fork() == 0:
    raise OSError("a child")
os.wait()
{}
"""


@pytest.mark.parametrize(
    ("ending", "last"),
    [("raise ValueError('boom')", "ValueError: boom"), ("sys.exit(3)", ""), ("", "")],
)
def test_an_uncaught_exception_is_written(ending: str, last: str) -> None:
    file = ErrorFile()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(ending)],
            env={**os.environ, "SDP_ERROR_FILE": file.path},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        told = RankError.parse(file.read())
    finally:
        file.close()
    assert "OSError: a child" in done.stderr
    assert (told.traceback[-1] if told else "") == last, done.stderr
