"""What a terminal shows below the ranks' output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sdp_plugins.launch.output import OutputStream, Sink
from sdp_plugins.launch.status import Status, duration
from sdp_plugins.launch.who_waits import Waiting
from tests.ranks import HANG_S

ROOT = Path(__file__).parents[2]


class Screen:
    """As much of a terminal as is needed: it keeps its lines and obeys our sequences."""

    SEQUENCE = re.compile(rb"\x1b(7|8|D|\[\d*[A-Z])|\r|\n|[^\x1b\r\n]+")

    def __init__(self) -> None:
        self.lines = [""] * 200
        self.row = self.column = 0
        self.saved = (0, 0)

    def feed(self, data: bytes) -> None:
        for match in self.SEQUENCE.finditer(data):
            self.obey(match.group().decode())

    def obey(self, text: str) -> None:
        count = int("0" + "".join(filter(str.isdigit, text[2:]))) or 1
        if text == "\r":
            self.column = 0
        elif text == "\n":
            self.row, self.column = self.row + 1, 0
        elif text == "\x1bD":
            self.row += 1
        elif text == "\x1b7":
            self.saved = (self.row, self.column)
        elif text == "\x1b8":
            self.row, self.column = self.saved
        elif text.startswith("\x1b["):
            self.move(text[-1], count)
        else:
            line = self.lines[self.row].ljust(self.column)
            end = self.column + len(text)
            self.lines[self.row] = line[: self.column] + text + line[end:]
            self.column = end

    def move(self, what: str, count: int) -> None:
        if what == "A":
            self.row -= count
        elif what == "E":
            self.row, self.column = self.row + count, 0
        else:  # J and K erase to the end
            self.lines[self.row] = self.lines[self.row][: self.column]
            if what == "J":
                self.lines[self.row + 1 :] = [""] * (len(self.lines) - self.row - 1)

    @property
    def shown(self) -> list[str]:
        return "\n".join(self.lines).rstrip("\n").split("\n")


class Rank:
    where = "pid 1"
    started = True
    code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        raise NotImplementedError


class Terminal:
    """A terminal with a sink on it and two ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        self.sink = Sink(self.theirs)
        self.screen = Screen()
        self.ranks = [Rank() for _ in range(ranks)]
        self.streams = [OutputStream(f"[{n}] ", self.sink) for n in range(ranks)]
        self.waits: dict[int, Waiting] = {}
        self.status = Status(self.sink, lambda: self.waits)
        self.now = 100.0

    def look(self, after_s: float = 5.0) -> list[str]:
        self.now += after_s
        running = {n: rank for n, rank in enumerate(self.ranks) if rank.code is None}
        self.status.refresh(self.ranks, running, self.now)
        return self.read()

    def read(self) -> list[str]:
        os.set_blocking(self.ours, False)
        time.sleep(0.01)
        with suppress(BlockingIOError):
            self.screen.feed(os.read(self.ours, 1 << 16).replace(b"\r\n", b"\n"))
        return self.screen.shown

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal()
    yield found
    found.close()


def test_states_below_the_output(terminal: Terminal) -> None:
    terminal.ranks[0].started = False
    assert terminal.look() == ["rank 0: starting (0 s)", "rank 1: running (0 s)"]
    terminal.streams[1].feed(b"hello\n")
    assert terminal.read() == ["[1] hello"]  # nothing in its way
    terminal.ranks[0].started, terminal.ranks[1].code = True, 3
    assert terminal.look() == [
        *("[1] hello", "rank 0: running (0 s)", "rank 1: failed: exit code 3 (5 s)")
    ]
    terminal.status.close()
    assert terminal.read() == ["[1] hello"]
    terminal.streams[0].feed(b"bye\n")
    assert terminal.read() == ["[1] hello", "[0] bye"]


def test_who_waits_for_whom(terminal: Terminal) -> None:
    terminal.waits[0] = Waiting("waits for rank 1 in barrier #2", 7.5)
    assert terminal.look() == ["rank 0: running (0 s)", "rank 1: running (0 s)"]
    assert terminal.look() == [
        "rank 0: waits for rank 1 in barrier #2 (7 s)",
        "rank 1: running (5 s)",
    ]
    terminal.waits = {}
    assert terminal.look() == ["rank 0: running (10 s)", "rank 1: running (10 s)"]


def test_a_bar_stays_above(terminal: Terminal) -> None:
    for i in range(3):
        terminal.streams[0].feed(b"\r%d of 3" % i)
        terminal.streams[0].flush()
    below = ["rank 0: running (0 s)", "rank 1: running (0 s)"]
    assert terminal.look() == ["[0] 2 of 3", *below]
    terminal.streams[0].feed(b"\r3 of 3")
    terminal.streams[0].flush()
    assert terminal.read() == ["[0] 3 of 3"]
    assert terminal.look(1.0)[0] == "[0] 3 of 3"
    assert len(terminal.screen.shown) == 3


def test_a_prompt_is_left_alone(terminal: Terminal) -> None:
    terminal.streams[0].feed(b"(Pdb) ")
    terminal.streams[0].flush()
    assert terminal.look() == ["[0] (Pdb) "]
    terminal.streams[0].feed(b"x\n")
    assert len(terminal.look()) == 3


def test_many_ranks_share_a_line_with_the_first_that_waits() -> None:
    terminal = Terminal(17)
    terminal.waits[2] = Waiting("waits for rank 1", 7.5)
    terminal.look()
    (line,) = terminal.look()
    terminal.close()
    assert line == "17 ranks: 17 running; rank 2 waits for rank 1 (5 s)"


def test_many_ranks_share_a_line() -> None:
    terminal = Terminal(17)
    terminal.ranks[3].code, terminal.ranks[5].code = 0, 137
    (line,) = terminal.look()
    terminal.close()
    assert line == "17 ranks: 15 running, 1 ended, 1 failed; rank 5 failed: kil"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.9, "3 s"), (61, "1 min 1 s"), (3725, "1 h 2 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


HANGING = """
import os, time
from sdp_plugins.core import Group
with Group.from_env() as group:
    group.barrier()
    if group.rank == 1: time.sleep(600)
    group.barrier()
"""


def test_a_hang_is_seen(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(HANGING)
    line = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", "2", str(tmp_path / "x.py")]
    ours, theirs = pty.openpty()
    job = subprocess.Popen(line, cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while b"rank 0: waits for rank 1 in barrier #" not in seen:
            seen += os.read(ours, 4096)
    assert job.poll() is None, seen
    job.terminate()
    with suppress(OSError):
        while os.read(ours, 4096):
            pass
    os.close(ours)
    job.wait(timeout=HANG_S)


NOTEBOOK = {"TERM": "xterm-color", "PAGER": "cat"}  # of its `!sdp run`, whose output is a terminal


@pytest.mark.parametrize(
    ("option", "variables"), [("--status", {}), ("--no-status", {}), ("--status", NOTEBOOK)]
)
def test_on_a_terminal_only(option: str, variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import time; time.sleep(0.5); print('said')")
    line = [sys.executable, "-m", "sdp_plugins.launch", "run", option, "-n", "2"]
    line.append(str(tmp_path / "x.py"))
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PAGER": "less"} | variables
    done = subprocess.Popen(
        line, cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    )
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other end is closed
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert done.wait(timeout=HANG_S) == 0
    assert seen.count(b"said") == 2
    shown = option == "--status" and not variables
    assert (b"rank 0: running" in seen) == shown
    assert (b"\x1b" in seen) == shown
    piped = subprocess.run(line, cwd=ROOT, capture_output=True, check=True, timeout=HANG_S)
    assert piped.stderr == b""
