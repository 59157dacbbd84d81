"""Forwards the ranks' output, with a prefix on each line and no two ranks in one line.

Lines end with a newline, or with the carriage return of a progress bar. A line that stays
unfinished for a moment (a prompt, a progress bar) is shown as it is. If another rank then writes,
its output starts on a new line, or replaces the progress bar on a terminal. What a rank writes to
erase its own bars (rich draws several lines) precedes the prefix, which it would erase as well. A
rank moves the cursor up only over lines that it has written, with no other rank's between them.

Writing never blocks: a slow or stopped reader must not prevent the launcher from ending the job.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from sdp_plugins.launch.terminal import is_terminal

CHUNK = 1 << 20  # no pipe holds more
BACKLOG_LIMIT = 1 << 20
SHOW_UNFINISHED_S = 0.05
LONGEST_UNFINISHED = 1 << 16
TAIL_LINES = 400
ERASE_BELOW = b"\x1b[J"
# A rank that is killed would leave the cursor hidden, or the terminal's other screen.
MODES = re.compile(rb"\x1b\[\?(?:25|47|1047|1049)[hl]")
UP = re.compile(rb"\x1b\[([0-9]*)A")
ERASED_LINES = re.compile(rb"(?:\x1b\[[0-9]*[AK])+")
PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\n)(?=.))|[^\r\n]+\r?\Z|\r\Z", re.DOTALL)


class Sink:
    """A descriptor of the launcher to which many streams write.

    Data that its reader has not taken yet is the backlog. After a write error all further data are
    discarded, so that the job can still end in order; `error` has the reason.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.terminal = is_terminal(fd)
        self.error: OSError | None = None
        self.backlog = bytearray()
        self.owner: OutputStream | None = None  # of the last unfinished line or progress bar
        self.midline = False  # whether the next byte continues a line
        self.writer: OutputStream | None = None  # of the line at the cursor, or else of the last
        self.above = 0  # lines of the writer right above the cursor
        self.drawn = 0  # those of them that belong to its bars
        self.erase_below: Callable[[], bytes] = bytes  # what erases lines below the output
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that the ranks must wait."""
        return len(self.backlog) > BACKLOG_LIMIT

    def write(self, data: bytes) -> None:
        """Write, now or later."""
        self.write_over(self.erase_below() + data)

    def write_over(self, data: bytes) -> None:
        """Write, now or later, without erasing the lines below the output."""
        if self.error is None:
            self.backlog += data
            self.drain()

    def drain(self) -> None:
        """Write as much as does not block: a pipe that is ready takes PIPE_BUF bytes."""
        while self.backlog and self._poll.poll(0):
            try:
                del self.backlog[: os.write(self.fd, self.backlog[: select.PIPE_BUF])]
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self.backlog.clear()

    def leave_line(self, next_owner: OutputStream | None) -> bytes:
        """The bytes that end another stream's line before `next_owner` writes."""
        owner = self.owner
        if owner is None or owner is next_owner:
            return b""
        self.owner, self.midline = None, False
        if not (self.terminal and owner.rewrites):
            return b"\n"
        bars = min(self.drawn, self.above)
        self.above -= bars
        return b"\r" + (b"\x1b[%dA" % bars if bars else b"") + ERASE_BELOW

    def announce(self, text: str) -> None:
        """Write lines of the launcher."""
        begin = self.leave_line(None) + (b"\x1b[0m" if self.terminal else b"")  # no rank's colour
        self.writer = None
        self.write(begin + text.encode(errors="surrogateescape") + b"\n")

    def moved_up(self, match: re.Match[bytes]) -> bytes:
        """A move of the cursor, unless it leads over another rank's lines."""
        lines = int(match[1] or 1)
        if lines > self.above:
            return b""
        self.above, self.drawn = self.above - lines, max(0, self.drawn - lines)
        return match[0]


def unblock(fd: int) -> None:
    """Reopen a pipe or terminal in non-blocking mode: other processes share the original.

    A descriptor that cannot be reopened (a socket, another user's pipe) is not changed.
    """
    if os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode):
        with suppress(OSError):
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, fd)
            os.close(own)


def sinks(stdout: int = 1, stderr: int = 2) -> tuple[Sink, Sink]:
    """The sinks of stdout and stderr; one sink twice if both are one file, to keep the order."""
    out = Sink(stdout)
    return out, out if os.path.sameopenfile(stdout, stderr) else Sink(stderr)


class Source(Protocol):
    """A descriptor that feeds one or several streams."""

    fd: int

    def read_ready(self) -> bool:
        """Read the available data; False at the end."""

    def held_back(self) -> bool:
        """Whether reading is paused."""


class Pipe:
    """A pipe whose data go to a function.

    Args:
        fd: The reading end.
        take: Called with the data that are read; with none at the end.
        held_back: Whether reading is paused.
    """

    def __init__(
        self,
        fd: int,
        take: Callable[[bytes], object],
        held_back: Callable[[], bool] = lambda: False,
    ) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.held_back = held_back
        self._take = take

    def read_ready(self) -> bool:
        """Read the available data; False at the end."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:  # nobody has the other end of a terminal any more
            if error.errno != errno.EIO:
                raise
            data = b""
        self._take(data)
        return bool(data)


class OutputStream:
    """One rank's stdout or stderr on its way to a sink.

    Args:
        prefix: Beginning of each line.
        sink: Destination.
        dropped: A prefix that is removed from each line, because `prefix` replaces it.

    Attributes:
        hidden: Whether lines are only kept in `tail`, not shown.
        tail: The last lines.
    """

    def __init__(self, prefix: str, sink: Sink, dropped: str = "") -> None:
        self.source: Source | None = None  # that feeds it
        self.prefix = prefix.encode()
        self.sink = sink
        self.hidden = False
        self.dropped = dropped.encode()
        self.rewrites = False  # its last line ended in a carriage return: a progress bar
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._unfinished = b""
        self._since = 0.0

    def held_back(self) -> bool:
        """Whether the rank must wait, because the sink's reader is far behind."""
        return self.sink.full

    def feed(self, data: bytes) -> None:
        """Show the lines that `data` completes, and keep the rest for a moment.

        At the end, for which there are no data, nothing is kept.
        """
        if not data:
            self.flush()
            return
        pieces = PIECE.findall(MODES.sub(b"", self._unfinished + data))
        if not pieces:
            return
        last = pieces[-1]
        complete = last.endswith(b"\n") or len(last) > LONGEST_UNFINISHED
        self._unfinished = b"" if complete else pieces.pop()
        self._since = time.monotonic()
        self.show(pieces)

    def due(self) -> float | None:
        """When to show the unfinished line, on the monotonic clock."""
        return self._since + SHOW_UNFINISHED_S if self._unfinished else None

    def flush(self) -> None:
        """Show the unfinished line now."""
        if self._unfinished:
            pieces, self._unfinished = [self._unfinished], b""
            self.show(pieces)

    def reveal(self) -> None:
        """Show what was hidden, and all that follows."""
        if self.hidden:
            self.hidden = False
            pieces = [*self.tail]
            self.tail.clear()
            self.show(pieces)
            self.flush()

    def text(self) -> str:
        """The last lines, with the unfinished one."""
        return (b"".join(self.tail) + self._unfinished).decode(errors="replace")

    def show(self, pieces: list[bytes]) -> None:
        """Write pieces, each a line or a part of one."""
        if self.hidden:
            for piece in pieces:
                self.remember(piece)
            return
        data = b"".join(self.placed(piece) for piece in pieces)
        if data:
            self.sink.write(data)

    def placed(self, piece: bytes) -> bytes:
        """Add the prefix to a piece if it begins a line."""
        if self.dropped and not (self.tail and not self.tail[-1].endswith((b"\n", b"\r"))):
            piece = piece.removeprefix(self.dropped)
        self.remember(piece)
        sink = self.sink
        ours = sink.owner is self
        bare = piece in (b"\r", b"\n", b"\r\n")
        if piece == b"\r" and not ours:
            self.rewrites = True  # the first return of a progress bar: there is no line yet
            sink.drawn = 0
            return b""
        out = sink.leave_line(self)
        if sink.writer is not self:
            sink.writer, sink.above, sink.drawn = self, 0, 0
        elif ours and not sink.midline:
            sink.drawn = 0  # it draws again
        erased = ERASED_LINES.match(piece) if not sink.midline else None
        if erased:
            piece = piece[erased.end() :]
            out += UP.sub(sink.moved_up, erased[0])
        if not sink.midline and not (ours and bare):
            out += self.prefix
        piece = UP.sub(sink.moved_up, piece)
        if piece.endswith(b"\n"):
            sink.above, sink.drawn = sink.above + 1, sink.drawn + 1
        sink.midline = not piece.endswith((b"\n", b"\r"))
        sink.owner = None if piece.endswith(b"\n") else self
        if not sink.midline:
            self.rewrites = piece.endswith(b"\r")
        return out + piece

    def remember(self, piece: bytes) -> None:
        """Keep the last lines for a report."""
        if self.tail and not self.tail[-1].endswith((b"\n", b"\r")):
            piece = self.tail.pop() + piece
        self.tail.append(piece[-LONGEST_UNFINISHED:])
