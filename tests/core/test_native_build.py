"""Native code of plug-ins is compiled once, and again if what it is made of has changed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from sdp_plugins.core.native_build import CompileError, build

SOURCE = """
#include "sdp_api.h"
#include "answer.h"
extern "C" int answer() { return ANSWER + SDP_API_VERSION - SDP_API_VERSION; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDP_CACHE", str(tmp_path / "cache" / "of mine"))
    monkeypatch.delenv("SDP_NATIVE_OPS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    path = folder / "answer.cc"
    path.write_text(SOURCE)
    return path


def answer(library: Path) -> int:
    found: int = ctypes.CDLL(str(library)).answer()
    return found


def test_compiled_once(source: Path) -> None:
    library = build(source, "1.0", ["-std=c++17"], ["-lm"])
    assert answer(library) == 42
    made = library.stat().st_mtime_ns
    assert build(source, "1.0", ["-std=c++17"], ["-lm"]).stat().st_mtime_ns == made
    assert {path.suffix for path in library.parent.iterdir()} == {".so", ".lock"}


def test_compiled_again(source: Path) -> None:
    """For another framework's version, other flags, another header."""
    made = {build(source, "1.0", []), build(source, "1.1", []), build(source, "1.0", ["-g0"])}
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    made.add(build(source, "1.0", []))
    assert len(made) == 4
    assert sorted(map(answer, made)) == [42, 42, 42, 43]


def test_made_ahead_for_a_machine_without_a_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(source, "1.0", [])
    monkeypatch.setenv("CXX", "c++-of-nobody")
    assert build(source, "1.0", []) == library
    with pytest.raises(CompileError, match=r"no compiler c\+\+-of-nobody\. Hint: install g\+\+"):
        build(source, "1.1", [])


def test_what_cannot_be_compiled_is_named(source: Path) -> None:
    source.write_text(SOURCE.replace("ANSWER +", "NOTHING +"))
    with pytest.raises(CompileError, match=r"answer: .*error: .*NOTHING"):
        build(source, "1.0", [])


def test_a_cache_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDP_CACHE", str(source))
    with pytest.raises(CompileError, match=r"answer.cc: .*Hint: SDP_CACHE names another"):
        build(source, "1.0", [])
