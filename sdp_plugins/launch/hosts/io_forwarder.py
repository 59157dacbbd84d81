"""One rank and the connection with the launcher: what comes from one goes to the other."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

from sdp_plugins.launch.event_loop import empty
from sdp_plugins.launch.hosts import messages
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process

START_S = 120.0
CHUNK = 1 << 16
OUTBOX_LIMIT = 1 << 20  # beyond it the rank has to wait for the launcher


class Start(NamedTuple):
    """What only the launcher knows, when all agents have called.

    Attributes:
        master_addr: Of rank 0's host.
        master_port: On that.
        node: The index of our host.
        nodes: How many there are.
        command: The rank's command line; to mpirun a `:` in it would begin another program.
    """

    master_addr: str
    master_port: int
    node: int
    nodes: int
    command: list[str]


class IoForwarder:
    """Stands between a rank and the launcher.

    Args:
        link: The connection, which it closes.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.inbox = messages.Inbox()
        self.inbox.longest = messages.LONGEST
        self.outbox = bytearray()
        self.selector = selectors.DefaultSelector()
        self.rank: RankProcess | None = None
        self.pipes: dict[int, bytes] = {}  # the rank's output: what kind it is
        self.exit_told = False
        self.reaper = Reaper()

    def ask(self, hello: Mapping[str, object]) -> Start:
        """Say who we are; what the launcher answers, once all agents have done so."""
        self.link.sendall(messages.message(messages.HELLO, hello))
        self.link.settimeout(START_S)
        while data := self.link.recv(CHUNK):
            for kind, body in self.inbox.feed(data):
                if kind == messages.START:
                    self.link.setblocking(False)
                    return Start(**messages.read_json(body))
        raise ConnectionResetError("the launcher has left")

    def refuse(self, text: str) -> None:
        """Tell why there will be no rank."""
        with suppress(OSError):
            self.link.setblocking(True)
            self.link.sendall(messages.message(messages.REFUSED, text.encode()))

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the rank's program.

        Raises:
            OSError, subprocess.SubprocessError: It cannot be started.
        """
        rank = start_process(command, environment, child_setup(set()), stdin=False, inherit=True)
        self.rank = rank
        self.reaper.watch(rank.pid)
        self.pipes = {rank.stdout: messages.STDOUT, rank.stderr: messages.STDERR}
        for fd in self.pipes:
            os.set_blocking(fd, False)
        self.say(messages.STARTED, {"pid": rank.pid})

    def say(self, kind: bytes, body: bytes | object) -> None:
        """Send a message, now or later."""
        self.outbox += messages.message(kind, body)
        self.send()

    def send(self) -> None:
        """Send what the launcher takes now."""
        with suppress(BlockingIOError):
            while self.outbox:
                del self.outbox[: self.link.send(self.outbox[:CHUNK])]

    def forward(self, fd: int) -> bool:
        """Pass on what a pipe has; False at its end, or if it has nothing now."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.say(self.pipes[fd], data)
        else:
            self.pause(fd, True)
            del self.pipes[fd]
        return bool(data)

    def obey(self) -> bool:
        """Carry out what the launcher says; False when it lets us go."""
        with suppress(BlockingIOError):
            data = self.link.recv(CHUNK)
            for kind, body in self.inbox.feed(data):
                if kind == messages.SIGNAL and self.rank and not self.exit_told:
                    with suppress(ProcessLookupError):
                        self.rank.send(int(messages.read_json(body)["number"]))
            return bool(data)
        return True

    def look_after(self) -> None:
        """Tell of the rank's end, after what it has written."""
        code = self.rank.exit_code() if self.rank else None
        if code is None or self.exit_told:
            return
        for fd in list(self.pipes):
            while fd in self.pipes and self.forward(fd):
                pass
        self.exit_told = True
        error = self.rank.error_file.read() if self.rank else None
        self.say(messages.EXIT, {"code": code, "error": error})

    def serve(self, alarm: int) -> None:
        """Stand between rank and launcher until the latter lets us go, or is lost."""
        self.selector.register(alarm, selectors.EVENT_READ)
        self.selector.register(self.link, selectors.EVENT_READ)
        for fd in self.pipes:
            self.selector.register(fd, selectors.EVENT_READ)
        with suppress(ConnectionError, TimeoutError):
            while self.wait(alarm):
                self.look_after()

    def wait(self, alarm: int) -> bool:
        """Wait for something and take it; False when the launcher lets us go."""
        reads, both = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
        self.selector.modify(self.link, both if self.outbox else reads)
        for fd in self.pipes:
            self.pause(fd, len(self.outbox) > OUTBOX_LIMIT)
        for key, events in self.selector.select():
            if key.fd == alarm:
                empty(alarm)
            elif key.fd in self.pipes:
                self.forward(key.fd)
            elif events & selectors.EVENT_READ and not self.obey():
                return False
        self.send()
        return True

    def pause(self, fd: int, wanted: bool) -> None:
        """Read from a pipe, or do not."""
        watched = fd in self.selector.get_map()
        if watched and wanted:
            self.selector.unregister(fd)
        elif not watched and not wanted:
            self.selector.register(fd, selectors.EVENT_READ)

    def close(self) -> None:
        """End what is left of the rank, and say its last words."""
        if self.rank:
            kill_sessions({self.rank.pid})
            with suppress(OSError):
                self.link.settimeout(1.0)
                for fd, kind in self.pipes.items():
                    while data := read_now(fd):
                        self.outbox += messages.message(kind, data)
                self.link.sendall(self.outbox)
            self.rank.close()
        self.reaper.dismiss()
        self.link.close()


def read_now(fd: int) -> bytes:
    """What a pipe has; nothing at its end, or if it is empty."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return b""


@contextmanager
def woken(forwarder: IoForwarder) -> Iterator[int]:
    """A pipe that has something when a child ends; mpirun's SIGTERM is as good as a farewell."""

    def leave(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            forwarder.link.shutdown(socket.SHUT_RD)

    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, nothing)
    signal.signal(signal.SIGTERM, leave)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    yield reader


def nothing(number: int, frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which the rank would inherit."""
