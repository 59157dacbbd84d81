"""Waits for the ranks' output and for signals."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from sdp_plugins.launch.output import OutputStream, Pipe, Sink, Source

ASKED = signal.SIGUSR1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST_WAIT_S = 3600.0  # epoll takes no more than 24 days
Handler = Callable[[int, FrameType | None], None]


class EventLoop:
    """Forwards the output of all ranks as it arrives."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = set(sinks)
        self._selector = selectors.DefaultSelector()
        self._streams: list[OutputStream] = []
        self._sources: dict[int, Source] = {}  # that have not ended, by descriptor
        self._watched: set[int] = set()

    def read_from(self, fd: int, stream: OutputStream) -> None:
        """Read a stream from a rank's pipe."""
        stream.source = Pipe(fd, stream.feed, stream.held_back)
        self.add_source(stream.source)

    def add_stream(self, prefix: str, sink: Sink, dropped: str = "") -> OutputStream:
        """Make a stream that another source feeds; the arguments are those of `OutputStream`."""
        stream = OutputStream(prefix, sink, dropped)
        self._streams.append(stream)
        return stream

    def drop_stream(self, stream: OutputStream) -> None:
        """Forget a stream that nobody feeds any more."""
        self._streams.remove(stream)

    def add_source(self, source: Source) -> None:
        """Read from a source until its end."""
        self._sources[source.fd] = source

    def drop_source(self, source: Source) -> None:
        """Stop reading from a source; its descriptor may then be closed."""
        if self._sources.get(source.fd) is source:
            self._watch(source.fd, selectors.EVENT_READ, bool, False)
            del self._sources[source.fd]

    def add_alarm(self, fd: int, then: Callable[[], None] | None = None) -> None:
        """Wake up when a descriptor is readable, and call `then`; by default, empty the pipe."""
        self._selector.register(fd, selectors.EVENT_READ, then or partial(empty, fd))

    def drop_alarm(self, fd: int) -> None:
        """Stop waking up for a descriptor."""
        self._selector.unregister(fd)

    def backlogged(self) -> bool:
        """Whether a reader has not yet taken all that was written."""
        return any(sink.backlog for sink in self._sinks)

    def _choose(self) -> None:
        """Wait for sinks with a backlog to be writable, and for sources that are not held back."""
        for sink in self._sinks:
            self._watch(sink.fd, selectors.EVENT_WRITE, sink.drain, bool(sink.backlog))
        for fd, source in self._sources.items():
            then = partial(self.read, source)
            self._watch(fd, selectors.EVENT_READ, then, not source.held_back())

    def _watch(self, fd: int, event: int, then: Callable[[], object], wanted: bool) -> None:
        if wanted and fd not in self._watched:
            self._selector.register(fd, event, then)
            self._watched.add(fd)
        elif not wanted and fd in self._watched:
            self._selector.unregister(fd)
            self._watched.discard(fd)

    def run_once(self, until: float | None) -> None:
        """Wait for output, writable sinks, a signal or the time `until`, and show new output.

        An unfinished line is shown only after its rank has had time to finish it, which it has not
        while its output is held back.
        """
        self._choose()
        heard = [s for s in self._streams if s.source and s.source.fd in self._watched]
        times = [due for stream in heard if (due := stream.due()) is not None]
        times += [] if until is None else [until]
        wait_s = min(LONGEST_WAIT_S, max(0.0, min(times) - time.monotonic())) if times else None
        for key, _ in self._selector.select(wait_s):
            key.data()
        now = time.monotonic()
        for stream in heard:
            if (due := stream.due()) is not None and due <= now:
                stream.flush()

    def read(self, source: Source) -> None:
        """Forward the output that a source has now."""
        if self._sources.get(source.fd) is source and not source.read_ready():
            self.drop_source(source)

    def finish(self, timeout_s: float) -> None:
        """Forward the output left in the pipes, until all have ended or the time is over."""
        for source in [*self._sources.values()] * 2:  # first the data, then the end
            self.read(source)
        end = time.monotonic() + timeout_s
        while self._sources and time.monotonic() < end:
            self.run_once(end)
        for source in [*self._sources.values()]:
            self.drop_source(source)
        for stream in self._streams:
            stream.flush()

    def close(self) -> None:
        """Close the selector; the owners of the pipes close them."""
        self._selector.close()


def empty(fd: int) -> None:
    """Discard the content of a non-blocking pipe."""
    with suppress(BlockingIOError):
        os.read(fd, 4096)


@contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Block the signals that end a job, and yield those that were blocked before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def signals_handled(handler: Handler, loop: EventLoop) -> Iterator[None]:
    """Call `handler` for the signals that end a job, for SIGUSR1 and for SIGWINCH.

    These signals and SIGCHLD wake the loop.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    loop.add_alarm(reader)
    # A signal that our parent ignores (nohup, a background job of a shell) stays ignored.
    numbers = [
        n for n in (*FORWARDED, ASKED, signal.SIGWINCH) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {n: signal.signal(n, handler) for n in numbers}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, previous in before.items():
            signal.signal(number, previous)
        os.close(reader)
        os.close(writer)
