"""The ranks' output on the launcher's: prefixed by line, never mixed within one.

Lines end with a newline, or with the carriage return of a progress bar. A line that stays
unfinished for a moment (a prompt, a bar) is shown as far as it goes; if another rank writes
meanwhile, it starts a new line, or takes the place of the bar on a terminal.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from dataclasses import dataclass

CHUNK = 1 << 16
SHOW_UNFINISHED_S = 0.05
LONGEST_UNFINISHED = 1 << 16
TAIL_LINES = 400
ERASE_LINE = b"\r\x1b[K"
PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\n)(?=.))|[^\r\n]+\r?\Z|\r\Z", re.DOTALL)


class Screen:
    """The line in which the next byte lands; stdout and stderr share it if they are one file."""

    def __init__(self) -> None:
        self.owner: Stream | None = None  # whose unfinished line or bar it is
        self.midline = False  # not at the start of a line


@dataclass
class Sink:
    """A descriptor of the launcher to which many streams write.

    Once it could not be written it swallows everything, so that the job can still be ended in
    good order; `error` says why.
    """

    fd: int
    screen: Screen
    error: OSError | None = None

    def __post_init__(self) -> None:
        self.terminal = os.isatty(self.fd)

    def write(self, data: bytes) -> None:
        """Write all of it, at once as far as the kernel lets us."""
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # whoever shares the terminal with us has set it so
                select.select([], [self.fd], [])
            except OSError as error:
                self.error = error

    def leave_line(self, next_owner: Stream | None) -> bytes:
        """What to write so that `next_owner` does not write into another's line."""
        owner = self.screen.owner
        if owner is None or owner is next_owner:
            return b""
        self.screen.owner, self.screen.midline = None, False
        return ERASE_LINE if self.terminal and owner.rewrites else b"\n"

    def announce(self, text: str) -> None:
        """Write lines of the launcher itself."""
        self.write(self.leave_line(None) + text.encode(errors="surrogateescape") + b"\n")


def open_standard_streams() -> None:
    """Put /dev/null where one is closed, or a pipe of ours would take its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def sinks(stdout: int = 1, stderr: int = 2) -> tuple[Sink, Sink]:
    """The launcher's two sinks."""
    screen = Screen()
    same = os.path.sameopenfile(stdout, stderr)
    return Sink(stdout, screen), Sink(stderr, screen if same else Screen())


class Stream:
    """One rank's stdout or stderr on its way to a sink."""

    def __init__(self, fd: int, prefix: str, sink: Sink) -> None:
        self.fd = fd
        self.prefix = prefix.encode()
        self.sink = sink
        self.rewrites = False  # its last line ended in a carriage return: a progress bar
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._unfinished = b""
        self._since = 0.0

    def pump(self) -> bool:
        """Pass on what there is to read; False at the end of the stream."""
        while True:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return True
            if not data:
                self.flush()
                return False
            self.feed(data)
            if len(data) < CHUNK:  # others have something to say, too
                return True

    def feed(self, data: bytes) -> None:
        """Show the lines that `data` completes, keep the rest for a moment."""
        pieces = PIECE.findall(self._unfinished + data)
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

    def show(self, pieces: list[bytes]) -> None:
        """Write pieces, each a line or a part of one."""
        data = b"".join(self.placed(piece) for piece in pieces)
        if data:
            self.sink.write(data)

    def placed(self, piece: bytes) -> bytes:
        """`piece` with the prefix that it needs where it lands."""
        self.remember(piece)
        screen = self.sink.screen
        ours = screen.owner is self
        bare = piece in (b"\r", b"\n", b"\r\n")
        if piece == b"\r" and not ours:
            self.rewrites = True  # a bar starts with a return; there is nothing to return to
            return b""
        out = self.sink.leave_line(self)
        if not screen.midline and not (ours and bare):
            out += self.prefix
        screen.midline = not piece.endswith((b"\n", b"\r"))
        screen.owner = None if piece.endswith(b"\n") else self
        if not screen.midline:
            self.rewrites = piece.endswith(b"\r")
        return out + piece

    def remember(self, piece: bytes) -> None:
        """Keep the last lines for a report."""
        if self.tail and not self.tail[-1].endswith((b"\n", b"\r")):
            piece = self.tail.pop() + piece
        self.tail.append(piece[-LONGEST_UNFINISHED:])
