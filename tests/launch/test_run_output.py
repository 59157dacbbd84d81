"""What `sdp run` makes of its ranks' output, and of readers that are slow, stop or leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.jobs import LAUNCHER, ROOT, Script, launch, read_pids, start
from tests.processes import wait_until_gone
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side


def test_lines_are_prefixed_and_never_mixed(script: Script) -> None:
    path = script(
        """
        for i in range(300):
            sys.stdout.write(f"{rank}-{i} "); sys.stdout.write("x" * 200 + "\\n")
            print(f"e{rank}-{i}", file=sys.stderr)
        """
    )
    done = launch("-n", "4", path)
    assert done.returncode == 0
    wanted = {f"[rank {r}] {r}-{i} {'x' * 200}" for r in range(4) for i in range(300)}
    assert set(done.stdout.splitlines()) == wanted
    for rank in range(4):
        mine = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] e{rank}-{i}" for i in range(300)]


def test_output_is_not_held_back(script: Script) -> None:
    launcher = start("-n", "1", script("print('at once'); time.sleep(600)"))
    assert launcher.stdout
    assert launcher.stdout.readline() == "[rank 0] at once\n"
    launcher.terminate()
    launcher.communicate(timeout=HANG_S)


def test_reader_that_leaves_ends_the_job(script: Script) -> None:
    path = script("print(os.getpid())\nwhile True: print('y'); time.sleep(0.01)")
    launcher = start("-n", "1", path)
    pids = read_pids(launcher, 1)
    assert launcher.stdout and launcher.stderr
    launcher.stdout.close()
    assert launcher.wait(timeout=HANG_S) == 128 + signal.SIGPIPE
    launcher.stderr.close()
    wait_until_gone(pids)


LOUD = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
count = pathlib.Path(__file__).with_name(f"count {rank}")
count.write_text("0")  # another rank may fill the launcher's memory before this one's first text
for i in range(1, 1 << 30):
    sys.stdout.write(("x" * 99 + "\\n") * 600)
    count.write_text(str(i))
"""


@contextmanager
def unread(kind: str) -> Iterator[int]:
    """The writing end of what nobody reads."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def start_unread(writer: int, *args: str, **options: Any) -> subprocess.Popen[str]:
    options = {"stderr": writer} | options
    return subprocess.Popen(
        [*LAUNCHER, *args], cwd=ROOT, stdout=writer, text=True, start_new_session=True, **options
    )


def written(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("count *"))]


def wait_until_stuck(folder: Path) -> None:
    """Until two loud ranks have been waiting for their reader for a while."""
    end = time.monotonic() + HANG_S
    before: list[str] = []
    while len(before) < 2 or before != written(folder) or not all(before):
        before = written(folder)
        assert time.monotonic() < end, before
        time.sleep(0.5)
    assert sum(map(int, before)) * 60000 < 4 << 20  # the rest is not in the launcher's memory


def test_a_time_out_does_not_wait_for_the_reader(script: Script) -> None:
    loud = script(LOUD)
    with unread("pipe") as pipe, unread("terminal") as terminal, open(os.devnull, "w") as nowhere:
        writers = (pipe, terminal, nowhere.fileno())  # the last takes more than can be shown
        launchers = [start_unread(w, "-n", "2", "--timeout", "2", loud) for w in writers]
        assert [launcher.wait(timeout=HANG_S) for launcher in launchers] == [124] * 3


def test_signals_do_not_wait_for_the_reader(script: Script, tmp_path: Path) -> None:
    side_by_side(
        terminate_unread,
        [
            ("pipe", 2, script(LOUD, "pipe")),
            ("terminal", 2, script(LOUD, "terminal")),
            ("pipe", 1, script(LOUD, "escalation")),
        ],
    )


def terminate_unread(kind: str, times: int, path: str) -> None:
    """A job that is stuck ends at the second SIGTERM, or a while after the first."""
    with unread(kind) as writer:
        launcher = start_unread(writer, "-n", "2", path)
        wait_until_stuck(Path(path).parent)
        assert os.get_blocking(writer)  # whom it belongs to would be surprised
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.terminate()
        if times == 2:
            time.sleep(0.5)
            launcher.terminate()
        code = launcher.wait(timeout=HANG_S)
        assert code == 128 + (signal.SIGTERM if times == 2 else signal.SIGKILL)
        wait_until_gone([rank.pid for rank in ranks])


def test_the_user_need_not_wait_for_the_reader_of_the_rest(script: Script) -> None:
    text = "for _ in range(3): print('x' * 50000)\ntouch('done')"
    calls = [(signal.SIGTERM, script(text, "signal")), (None, script(text, "time-out"))]
    side_by_side(leave_the_rest, calls)


def leave_the_rest(end: signal.Signals | None, path: str) -> None:
    with unread("pipe") as writer:
        options = [] if end else ["--timeout", "3"]
        launcher = start_unread(writer, "-n", "1", *options, path, stderr=subprocess.PIPE)
        while not Path(path).with_name("done").exists():
            time.sleep(0.01)
        time.sleep(1.5)  # longer than the launcher waits for those who are not slow, but gone
        assert launcher.poll() is None
        if end:
            launcher.send_signal(end)
        _, stderr = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == (128 + end if end else 124)
        assert ("has not been read to the end" in stderr) == (end is None)


def test_a_slow_reader_gets_everything_in_order(script: Script) -> None:
    path = script(
        """
        for i in range(20000): sys.stdout.write(f"{rank}-{i} {'x' * 100}\\n")
        print("e" * 70000, file=sys.stderr)
        touch(f"done {rank}")
        if rank == 1:
            await_file("done 0")
            raise ValueError("the reason")
        """
    )
    launcher = subprocess.Popen(
        [*LAUNCHER, "-n", "2", path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout
    lines = []
    for i, line in enumerate(launcher.stdout):
        if i in (1000, 38000):  # while the ranks write, and when they have ended
            time.sleep(1.5)
        lines.append(line.rstrip())
    assert launcher.wait(timeout=HANG_S) == 1
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] {rank}-")]
        assert mine == [f"[rank {rank}] {rank}-{i} {'x' * 100}" for i in range(20000)]
        assert f"[rank {rank}] {'e' * 70000}" in lines
    head = next(i for i, line in enumerate(lines) if line.startswith("sdp run: rank 1 "))
    assert head > 40000 and lines[-1] == "ValueError: the reason"
    assert not any(line.startswith("[rank") for line in lines[head:])


ENDLESS = """
def stop(*_):
    touch(f"stopped {rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
touch(f"ready {rank}")
for other in (0, 1): await_file(f"ready {other}")
while True: print("y"); print("y", file=sys.stderr); time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_disk_ends_the_job(script: Script, tmp_path: Path, name: str) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as streams[name]:
        done = subprocess.run(
            [*LAUNCHER, "-n", "2", script(ENDLESS)], cwd=ROOT, text=True, timeout=HANG_S, **streams
        )
    assert done.returncode == 1
    assert {path.name for path in tmp_path.glob("stopped *")} == {"stopped 0", "stopped 1"}
    if name == "stdout":
        message = "sdp run: cannot write the ranks' output: No space left on device\n"
        assert done.stderr.endswith(message)
        assert "Traceback" not in done.stderr


def test_output_that_is_lost_at_the_end_is_a_failure(script: Script) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*LAUNCHER, "-n", "1", script("print('x')")],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 1
    assert done.stderr == "sdp run: cannot write the ranks' output: No space left on device\n"


def test_a_terminal_that_closes_ends_the_job(script: Script, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [*LAUNCHER, "-n", "2", script(ENDLESS)],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""  # the status is there as well
    while b"[rank " not in seen:
        seen += os.read(ours, 100)
    os.close(ours)
    assert launcher.wait(timeout=HANG_S) == 1
    assert len(list(tmp_path.glob("stopped *"))) == 2


BARS = """
import os
from rich.console import Console
from rich.progress import Progress
if rank == 0:
    print("columns:", Console().width, os.get_terminal_size(2).columns)
    with open("plain.log", "w") as log:
        Console(file=log).print("[red]no colours in a file")
    with Progress() as progress:
        for name in "ab":
            task = progress.add_task(name, total=2)
            for _ in range(2):
                progress.advance(task)
                progress.refresh()
    end = time.monotonic() + 60
    while (columns := os.get_terminal_size(2).columns) > 50 and time.monotonic() < end:
        print("narrower, please")
        time.sleep(0.1)
    print("columns:", columns)
else:
    sys.stdin.read()
"""


def test_bars_move_on_a_terminal(script: Script, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    unset = ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"TERM": "xterm"}
    line = [*LAUNCHER, "-n", "2", script(BARS)]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    environment["PYTHONPATH"] = str(ROOT)
    job = subprocess.Popen(line, cwd=tmp_path, env=environment, **streams)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # EIO: the launcher has ended
        while data := os.read(ours, 1 << 16):
            seen += data
            if b"narrower" in data:
                fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 50, 0, 0))
                job.send_signal(signal.SIGWINCH)  # which it had if the terminal were its own
    os.close(ours)
    assert job.wait(timeout=HANG_S) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
    assert "columns: 91 91" in text and "columns: 41" in text  # less the prefix
    assert (tmp_path / "plain.log").read_text() == "no colours in a file\n"
    assert {*re.findall(r"\[rank 0\] a [^\r\n]* (50|100)%", text)} == {"50", "100"}
    assert "\x1b[1A\x1b[2K[rank 0] a" in text  # both lines are drawn again
    assert "\x1b[?25l" not in text


def test_a_closed_stdout_is_dev_null(script: Script) -> None:
    done = launch("-n", "1", script("print('x'); sys.exit(3)"), preexec_fn=lambda: os.close(1))
    assert done.returncode == 3
    assert "Traceback" not in done.stderr and done.stdout == ""
