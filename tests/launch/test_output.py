"""How the ranks' output is put together."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from sdp_plugins.core.error_file import RankError
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import BACKLOG_LIMIT, LONGEST_UNFINISHED, OutputStream, Sink, sinks
from sdp_plugins.launch.report import (
    TRACEBACK,
    FailedRank,
    FailureOrigin,
    blamed,
    described,
    excerpt,
)

F_SETPIPE_SZ = 1031


class Wall:
    """A pipe to write on, and streams of ranks that lead there."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, F_SETPIPE_SZ, 1 << 20)
        self.sink = Sink(self.writer)
        self.ranks = [OutputStream(f"[{rank}] ", self.sink) for rank in range(2)]

    def text(self) -> str:
        self.sink.write(b"\0")
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self.reader, 1 << 20)
        return data[:-1].decode()


@pytest.fixture
def wall() -> Iterator[Wall]:
    wall = Wall()
    yield wall
    os.close(wall.reader)
    os.close(wall.writer)


def test_parts_of_a_line_are_put_together(wall: Wall) -> None:
    one, two = wall.ranks
    one.feed(b"a")
    two.feed(b"x\ny")
    one.feed(b"b\nc\r\nd")
    assert wall.text() == "[1] x\n[0] ab\n[0] c\r\n"
    two.flush()
    one.flush()
    assert wall.text() == "[1] y\n[0] d"


def test_torchs_prefix_is_not_added_to_ours(wall: Wall) -> None:
    rank = OutputStream("[rank 1] ", wall.sink, "[rank1]: ")
    rank.feed(b"[rank1]: Traceback\n[rank1]:   File\n")
    rank.feed(b"x [rank1]: y")
    rank.flush()
    rank.feed(b"[rank1]: z\n[rank0]: other\n")
    assert wall.text().splitlines() == [
        *("[rank 1] Traceback", "[rank 1]   File"),
        *("[rank 1] x [rank1]: y[rank1]: z", "[rank 1] [rank0]: other"),
    ]
    assert b"".join(rank.tail).startswith(b"Traceback\n  File\n")


def test_an_unfinished_line_goes_on_where_it_stood(wall: Wall) -> None:
    one, two = wall.ranks
    one.feed(b"name? ")
    one.flush()
    one.feed(b"me\n")
    assert wall.text() == "[0] name? me\n"
    one.feed(b"name? ")
    one.flush()
    two.feed(b"x\n")
    one.feed(b"me\n")
    assert wall.text() == "[0] name? \n[1] x\n[0] me\n"


def test_a_bar_is_redrawn_in_its_line(wall: Wall) -> None:
    one = wall.ranks[0]
    for percent in (10, 20, 100):
        one.feed(b"\r%d%%" % percent)
        one.flush()
    one.feed(b"\nend\n")
    assert wall.text() == "[0] 10%\r[0] 20%\r[0] 100%\n[0] end\n"


def test_a_bar_with_its_return_at_the_end(wall: Wall) -> None:
    one = wall.ranks[0]
    one.feed(b"10%\r")
    one.flush()
    one.feed(b"20%\r")
    one.feed(b"\n")
    assert wall.text() == "[0] 10%\r[0] 20%\r\n"


def test_others_do_not_write_into_a_bar(wall: Wall) -> None:
    one, two = wall.ranks
    one.feed(b"\r10%")
    one.flush()
    two.feed(b"x\n")
    one.feed(b"\r20%")
    one.flush()
    assert wall.text() == "[0] 10%\n[1] x\n[0] 20%"
    wall.sink.terminal = True
    two.feed(b"y\n")
    assert wall.text() == "\r\x1b[J[1] y\n"


def test_bars_of_several_lines_are_erased_before_the_prefix(wall: Wall) -> None:
    one, two = wall.ranks
    one.feed(b"\x1b[?25l")  # rich hides the cursor
    for count in (1, 2):
        one.feed(b"a %d\nb %d" % (count, count))
        one.flush()
        one.feed(b"\r\x1b[2K\x1b[1A\x1b[2K")
    one.feed(b"a 3\nb 3")
    one.flush()
    again = "\r\x1b[2K\x1b[1A\x1b[2K[0] "
    assert wall.text() == f"[0] a 1\n[0] b 1{again}a 2\n[0] b 2{again}a 3\n[0] b 3"
    two.feed(b"x\n")
    one.feed(b"\r\x1b[2K\x1b[1A\x1b[2Ka 4\nb 4\n\x1b[?2")
    one.feed(b"5h")
    assert wall.text() == "\n[1] x\n\x1b[2K\x1b[2K[0] a 4\n[0] b 4\n"  # x is not erased


class Screen:
    """What a terminal shows of text and of the sequences that bars use; it scrolls for ever."""

    def __init__(self, text: str) -> None:
        self.rows, self.row, self.column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
            self._take(part)

    def _take(self, part: str) -> None:
        line = self.rows[self.row]
        if part == "\r":
            self.column = 0
        elif part == "\n":
            self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row == len(self.rows))
        elif part.endswith("A") and part.startswith("\x1b"):
            self.row -= int(part[2:-1] or 1)
            assert self.row >= 0
        elif part in ("\x1b[K", "\x1b[2K", "\x1b[J"):
            self.rows[self.row] = "" if part == "\x1b[2K" else line[: self.column]
            del self.rows[self.row + 1 if part == "\x1b[J" else len(self.rows) :]
        else:
            line = line.ljust(self.column)
            self.column += len(part)
            self.rows[self.row] = line[: self.column - len(part)] + part + line[self.column :]


def drawn_by_rich(step: int) -> bytes:
    again = b"\r\x1b[2K\x1b[1A\x1b[2K" if step else b""
    return again + b"bar %d\nval %d" % (step, step)


def drawn_by_tqdm(step: int) -> bytes:
    return b"\rbar %d" % step + b"\n\rval %d\x1b[A" % step


@pytest.mark.parametrize("draw", [drawn_by_rich, drawn_by_tqdm])
@pytest.mark.parametrize("seed", range(20))
def test_no_line_of_another_rank_is_lost(
    draw: Callable[[int], bytes], seed: int, wall: Wall
) -> None:
    """Whenever it comes; and the last state of the bars stands below it, once."""
    chance = random.Random(seed)
    wall.sink.terminal = True
    one, two = wall.ranks
    one.feed(b"first\n")
    for step in range(30):
        drawing = draw(step)
        cut = chance.choice([0, len(drawing), drawing.index(b"\n") + 1])
        for part in (drawing[:cut], drawing[cut:]):
            if part:
                one.feed(part)
            if chance.random() < 0.5:
                one.flush()
            if chance.random() < 0.3:
                two.feed(b"line %d\n" % step)
    one.feed(draw(30))
    one.flush()
    shown = [row for row in Screen(wall.text()).rows if row]
    fed = [line.decode().strip() for line in two.tail]
    assert fed and [row for row in shown if row.startswith("[1]")] == [f"[1] {x}" for x in fed]
    assert shown[0] == "[0] first" and {"[0] bar 30", "[0] val 30"} <= {*shown}
    assert len(shown) <= 1 + len(fed) * 3 + 2


def test_blank_lines_and_bytes_that_are_no_text(wall: Wall) -> None:
    wall.ranks[0].feed(b"\n\n\xff\xfe\n")
    wall.sink.write(b"\0")
    assert os.read(wall.reader, 1000) == b"[0] \n[0] \n[0] \xff\xfe\n\0"


def test_a_line_without_end_is_not_kept_for_ever(wall: Wall) -> None:
    one = wall.ranks[0]
    for _ in range(20):
        one.feed(b"x" * 20000)
        assert len(one._unfinished) + sum(map(len, one.tail)) <= 2 * LONGEST_UNFINISHED
    one.flush()
    assert len(wall.text()) == len("[0] ") + 400000


def test_what_cannot_be_written_is_dropped(wall: Wall) -> None:
    with open("/dev/full", "wb") as full:
        sink = Sink(full.fileno())
        one = OutputStream("", sink)
        for _ in range(2):
            one.feed(b"x\n")
        sink.announce("y")
    assert sink.error and sink.error.errno == errno.ENOSPC
    assert list(one.tail) == [b"x\n"] * 2


def test_hidden_output_is_shown_with_an_unfinished_line(wall: Wall) -> None:
    mpirun = OutputStream("", wall.sink)
    mpirun.hidden = True
    mpirun.feed(b"no such host\nbye")
    mpirun.reveal()
    assert wall.text() == "no such host\nbye"


def test_hidden_output_is_shown_once(wall: Wall) -> None:
    """The supervisor may ask several times why mpirun could not start the ranks."""
    mpirun = OutputStream("[mpirun] ", wall.sink)
    mpirun.hidden = True
    mpirun.feed(b"a long\nstory")
    assert wall.text() == "" and mpirun.text() == "a long\nstory"
    mpirun.feed(b"")  # the end of the pipe
    for _ in range(2):
        mpirun.reveal()
    mpirun.feed(b"!\n")
    assert wall.text() == "[mpirun] a long\n[mpirun] story!\n"
    assert mpirun.text() == "a long\nstory!\n"


def test_what_the_reader_does_not_take_waits_in_order(wall: Wall) -> None:
    one, two = wall.ranks
    line = b"x" * 999 + b"\n"
    one.feed(line * 3000)
    two.feed(b"y")
    two.flush()
    wall.sink.announce("z")
    assert wall.sink.full and len(wall.sink.backlog) > BACKLOG_LIMIT
    data = b""
    while wall.sink.backlog:
        data += os.read(wall.reader, 1 << 20)
        wall.sink.drain()
    assert not wall.sink.full
    assert data.decode() + wall.text() == f"[0] {line.decode()}" * 3000 + "[1] y\nz\n"


def test_a_line_is_whole_though_its_reader_kept_its_end_from_being_read(wall: Wall) -> None:
    (out_0, in_0), (out_1, in_1) = os.pipe(), os.pipe()
    os.set_blocking(wall.writer, False)
    with closing(EventLoop(wall.sink)) as loop:
        loop.read_from(
            out_1, loop.add_stream("[1] ", wall.sink)
        )  # read before rank 0, where there is something
        loop.read_from(out_0, loop.add_stream("[0] ", wall.sink))
        os.write(in_0, b"one ")
        loop.run_once(time.monotonic())
        wall.sink.write(bytes(1 << 20) + b"\n" * (BACKLOG_LIMIT + 1))
        assert wall.sink.full  # from here on nobody is listened to
        os.write(in_0, b"line\n")
        os.write(in_1, b"another\n")
        loop.run_once(time.monotonic() + 0.1)
        while wall.sink.backlog:
            os.read(wall.reader, 1 << 20)
            loop.run_once(time.monotonic())
        loop.run_once(time.monotonic())
        assert wall.text().splitlines()[-2:] == ["[1] another", "[0] one line"]
    for fd in (out_0, in_0, out_1, in_1):
        os.close(fd)


def test_a_reader_that_leaves_behind_a_backlog() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer)
    sink.write(b"x" * (BACKLOG_LIMIT + (1 << 20)))
    assert sink.full and not sink.error
    os.close(reader)
    sink.drain()
    assert isinstance(sink.error, BrokenPipeError) and not sink.backlog
    os.close(writer)


def test_stdout_and_stderr_share_a_line_if_they_are_one_terminal() -> None:
    ours, theirs = pty.openpty()
    reader, writer = os.pipe()
    try:
        out, err = sinks(theirs, theirs)
        assert out is err and out.terminal
        out, err = sinks(theirs, writer)
        assert out is not err and not err.terminal
    finally:
        for fd in (ours, theirs, reader, writer):
            os.close(fd)


def test_excerpt_starts_at_the_chain_of_the_last_traceback() -> None:
    block = "Traceback (most recent call last):\n  File x\n{}: y\n"
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    text = "a\n" + block.format("Old") + "b\n" + block.format("KeyError") + link + block.format("E")
    lines = excerpt([text.encode()])
    assert lines[2] == "KeyError: y" and lines[-1] == "E: y" and "b" not in lines


def test_excerpt_is_short() -> None:
    assert excerpt([b"%d\n" % i for i in range(1000)]) == [str(i) for i in range(980, 1000)]
    long = [b"Traceback (most recent call last):\n"] + [b"%d\n" % i for i in range(500)]
    lines = excerpt(long)
    assert len(lines) < 100 and lines[-1] == "499" and "more" not in lines[0]
    assert excerpt([]) == []


def test_excerpt_shows_the_last_state_of_a_bar() -> None:
    assert excerpt([b"10%\r", b"20%\r", b"100%\n", b"x\r\n"])[0].startswith("100%")


def test_excerpt_has_no_colours() -> None:
    """As Python 3.13 writes a traceback on a terminal."""
    tail = [
        b"x\n\x1b[1mTraceback (most recent call last):\x1b[0m\n",
        b'  File \x1b[35m"a.py"\x1b[0m, line \x1b[35m1\x1b[0m\n',
        b"\x1b[1;35mValueError\x1b[0m: \x1b[35mboom\x1b[0m\n",
    ]
    assert excerpt(tail) == [TRACEBACK, '  File "a.py", line 1', "ValueError: boom"]


def test_excerpt_of_a_chain_that_torch_has_prefixed() -> None:
    link = "During handling of the above exception, another exception occurred:"
    lines = ["noise", TRACEBACK, "KeyError: 1", "", link, "", TRACEBACK, "ValueError: 2"]
    tail = [f"[rank1]: {line}\n".encode() for line in lines]
    assert excerpt(tail) == [line.decode().rstrip("\n") for line in tail[1:]]


def test_excerpt_leaves_out_what_python_has_ignored() -> None:
    lines = [TRACEBACK, "ValueError: boom", "Exception ignored in: <x>", TRACEBACK, "OSError: late"]
    assert excerpt([f"{line}\n".encode() for line in lines])[:2] == [TRACEBACK, "ValueError: boom"]


def lost(*ranks: int, origin: int | None = None) -> FailedRank:
    return FailedRank(1, RankError("peer_lost", ranks, origin))


def wrote(text: str) -> list[bytes]:
    return [f"{line}\n".encode() for line in text.split("\n")]


OWN = FailedRank(1, RankError())
TRACED = FailedRank(1, None, wrote(f"{TRACEBACK}\nValueError: x"))
SILENT = FailedRank(3, where="pid 42")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ({2: OWN, 1: SILENT}, 2),
        ({2: SILENT, 1: OWN}, 1),
        ({2: SILENT, 1: TRACED}, 1),
        ({2: SILENT, 1: FailedRank(137)}, 1),
        ({2: SILENT, 1: SILENT}, 2),
        ({2: lost(0), 1: SILENT, 3: OWN}, 3),
        ({2: SILENT, 3: lost(1), 1: SILENT}, 1),
        ({2: lost(1), 1: SILENT}, 1),
        ({2: lost(0), 1: SILENT}, 1),
        ({2: lost(1), 3: lost(), 1: lost()}, 1),
        ({2: lost(1, 3), 1: lost()}, 1),
        ({2: lost(1, origin=3), 1: lost(), 3: lost()}, 3),
        ({2: lost(1, origin=3), 1: lost()}, 1),
        ({2: lost(3), 1: lost()}, 2),
        ({2: lost(), 1: lost()}, 2),
    ],
)
def test_who_is_blamed(failures: dict[int, FailedRank], rank: int) -> None:
    assert blamed(failures) == rank


@pytest.mark.parametrize(
    ("code", "text", "wanted"),
    [
        (1, f"{TRACEBACK}\nValueError: x", FailureOrigin.OWN),
        (1, f"[rank1]: {TRACEBACK}\n[rank1]: ValueError: x", FailureOrigin.OWN),
        (137, "", FailureOrigin.OWN),
        (3, "", FailureOrigin.SILENT),
        (255, "PeerLostError: x", FailureOrigin.SILENT),
    ],
)
def test_how_a_rank_without_an_error_file_failed(
    code: int, text: str, wanted: FailureOrigin
) -> None:
    assert FailedRank(code, None, wrote(text)).kind is wanted


def test_failure_names_ranks_that_it_may_have_waited_for() -> None:
    text = described("sdp run", 3, SILENT, [0, 2])
    assert "failed first: exit code 3, after ranks 0, 2 had ended without an error. It" in text
    text = described("sdp run", 30, SILENT, range(30))
    assert "after ranks 0-29 had ended" in text


def test_failure_names_signal_and_hint() -> None:
    text = described("sdp run", 3, FailedRank(128 + 7, where="pid 42"))
    assert "rank 3 (pid 42) failed first: killed by SIGBUS" in text
    assert "nothing to stderr" in text and "/dev/shm" in text
