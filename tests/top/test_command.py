"""`python -m sdp_plugins.top`: what it prints, and when it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sdp_plugins.top.cli import main
from tests.ranks import HANG_S, Ranks, Start
from tests.top.cases import going, train

ROW = re.compile(
    r"^ +\d+ +\d+  \S+ +(-|[\d.]+( k)?) +[\d.]+( k)? +[\d.]+ [kM]?B "
    r"+\d+ % +\d+ % +\d+ %  (in|[\d.]+ m?s after) [a-z]",
    re.M,
)


def key_of(ranks: Ranks) -> str:
    return ranks.environment["SDP_JOB_ID"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sdp_plugins.top", *arguments]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=HANG_S, cwd=cwd
    )


def test_files_of_the_current_folder_hide_no_module(tmp_path: Path) -> None:
    for name in ("rich", "json", "argparse", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    done = run("no-such-job", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("sdp top: no "), done.stderr


def test_one_sample_and_several(start_pooled: Start) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        once = run(key_of(ranks), "--once", "--interval", "0.5")
        assert (once.returncode, once.stderr) == (0, "")
        assert once.stdout.count("\ngroup seen (") == 1
        assert len(ROW.findall(once.stdout)) >= 2, once.stdout
        assert "rank 1 is the straggler: others waited for it" in once.stdout
        several = run(str(ranks[0].pid), "--count", "3", "--interval", "0.1")
        assert several.stdout.count("\ngroup seen (") == 3
        refused = run(key_of(ranks), "--interval", "0")
        assert refused.returncode == 2 and "at least 0.05 s" in refused.stderr


def test_it_ends_with_the_job(start_pooled: Start) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        line = command(key_of(ranks), "--interval", "0.1")
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as shown:
            assert shown.stdout is not None
            assert shown.stdout.readline().startswith("job ")
            assert psutil.Process(shown.pid).nice() == min(19, os.nice(0) + 5)  # the ranks go first
            for rank in ranks:
                rank.kill(signal.SIGKILL)
            rest, _ = shown.communicate(timeout=HANG_S)
        assert shown.returncode == 0
        assert rest.endswith("sdp top: the job has ended\n")


def test_no_such_job(start_pooled: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        assert main(["no-such-key"]) == 1
        assert capsys.readouterr().err.startswith("sdp top: no such job; there are\n  job ")


def test_a_reader_that_leaves(start_pooled: Start) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        line = command(key_of(ranks), "--interval", "0.05")
        pipe = subprocess.PIPE
        with subprocess.Popen(line, stdout=pipe, stderr=pipe) as shown:
            assert shown.stdout is not None and shown.stderr is not None
            shown.stdout.readline()
            shown.stdout.close()
            assert shown.wait(timeout=HANG_S) == 128 + signal.SIGPIPE
            assert shown.stderr.read() == b""


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_a_live_view_on_a_terminal(start_pooled: Start, leave: bytes) -> None:
    with start_pooled(2, train, 1) as ranks:
        going(ranks)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 140, 0, 0))
        before = termios.tcgetattr(theirs)
        line = command(key_of(ranks), "--interval", "0.2", "--serve")
        terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        environment = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(line, **terminal, env=environment, start_new_session=True) as shown:
            text = until_shown(ours, "rank 1 is the straggler")
            assert "waited for" in text
            before_it = text.split("\x1b[?1049h")[0]  # the screen that is there again afterwards
            assert re.fullmatch(r"page: http://127\.0\.0\.1:\d+/[\w-]{43}/", before_it.strip())
            take_terminal(shown, ours, leave)
            assert shown.wait(timeout=HANG_S) == 0
        assert termios.tcgetattr(theirs) == before
        os.close(theirs)
        os.close(ours)


def until_shown(terminal: int, part: str) -> str:
    text, end = "", time.monotonic() + HANG_S
    while part not in text:
        assert time.monotonic() < end, text
        text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def take_terminal(shown: subprocess.Popen[bytes], terminal: int, key: bytes) -> None:
    """Press a key; Ctrl-C is a signal, as the terminal is not the one of the session."""
    if key == b"\x03":
        shown.send_signal(signal.SIGINT)
    else:
        os.write(terminal, key)
    os.set_blocking(terminal, False)
    with suppress(BlockingIOError):
        while os.read(terminal, 1 << 16):
            pass
    os.set_blocking(terminal, True)
