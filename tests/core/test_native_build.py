"""Native code of plug-ins is compiled once, and again if what it is made of has changed."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from sdp_plugins.core.native_build import CompileError, build

SOURCE = """
#include "sdp_api.h"
#include "answer.h"
extern "C" int answer() { return sizeof(SdpApi) ? ANSWER : 0; }
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
    source.write_text(SOURCE.replace("ANSWER", "NOTHING"))
    with pytest.raises(CompileError, match=r"answer: .*error: .*NOTHING"):
        build(source, "1.0", [])


def test_a_cache_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDP_CACHE", str(source))
    with pytest.raises(CompileError, match=r"answer.cc: .*Hint: set SDP_CACHE to another"):
        build(source, "1.0", [])


AHEAD = """
from pathlib import Path
from sdp_plugins.core import native_build
native_build.compile_ahead("some.plugin", lambda: native_build.build(Path({source!r}), "1.0", []))
"""
SLOW = """#!/bin/sh
touch "{started}"
exec sleep 1000
"""


@pytest.fixture
def slow_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does not end; the path of a file that says that it has begun."""
    started, compiler = source.with_name("started"), source.with_name("slow-c++")
    compiler.write_text(SLOW.format(started=started))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return started


def folders(source: Path) -> list[Path]:
    cache = source.parent.parent / "cache" / "of mine"
    return [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_it_compiles(
    source: Path, slow_compiler: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    process = subprocess.Popen([sys.executable, "-c", AHEAD.format(source=str(source))])
    while not slow_compiler.exists():
        assert process.poll() is None
        time.sleep(0.01)
    if number == signal.SIGTERM:
        process.terminate()
        assert process.wait(100) == 128 + number
        assert folders(source) == []
        return
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait(100) == -number
    assert len(folders(source)) == 1
    subprocess.run(["kill", child], check=True)
    quick = SLOW.replace("exec sleep 1000", 'for output; do :; done; touch "$output"')
    source.with_name("slow-c++").write_text(quick.format(started=slow_compiler))
    build(source, "1.0", [])
    assert folders(source) == []


def test_help_compiles_nothing(source: Path, slow_compiler: Path) -> None:
    command = [sys.executable, "-c", AHEAD.format(source=str(source)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "python -m some.plugin" in done.stdout
    assert not slow_compiler.exists()


@pytest.mark.skipif(find_spec("jax") is None, reason="needs JAX")
def test_the_call_of_jax_compiles() -> None:
    """Where it does not, the tests on JAX pass by its fallback."""
    command = [sys.executable, "-m", "sdp_plugins.jax"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "all_reduce: compiled\n", done.stderr
