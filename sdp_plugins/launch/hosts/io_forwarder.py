"""Forwards output, signals and exit code between one rank and the launcher."""

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
OUTBOX_LIMIT = 1 << 20  # above it, the rank must wait for the launcher


class Start(NamedTuple):
    """The launcher's answer, once all agents have connected.

    Attributes:
        master_addr: Address of rank 0's host.
        master_port: Port on that host.
        node: Index of the agent's host.
        nodes: Number of hosts.
        command: The rank's command line. mpirun's own cannot have it: a `:` begins another program.
    """

    master_addr: str
    master_port: int
    node: int
    nodes: int
    command: list[str]


class IoForwarder:
    """Forwards between a rank and the launcher.

    Args:
        link: The connection to the launcher; the forwarder closes it.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.inbox = messages.Inbox()
        self.inbox.longest = messages.LONGEST
        self.outbox = bytearray()
        self.selector = selectors.DefaultSelector()
        self.rank: RankProcess | None = None
        self.pipes: dict[int, bytes] = {}  # the rank's pipes, and the kind of their messages
        self.exit_told = False
        self.reaper = Reaper()

    def ask(self, hello: Mapping[str, object]) -> Start:
        """Introduce this agent; returns the launcher's answer, once all agents have connected."""
        self.link.sendall(messages.message(messages.HELLO, hello))
        self.link.settimeout(START_S)
        while data := self.link.recv(CHUNK):
            for kind, body in self.inbox.feed(data):
                if kind == messages.START:
                    self.link.setblocking(False)
                    return Start(**messages.read_json(body))
        raise ConnectionResetError("sdp run has closed the connection")

    def refuse(self, text: str) -> None:
        """Report why the rank cannot be started."""
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
        """Queue a message, and send as much as possible."""
        self.outbox += messages.message(kind, body)
        self.send()

    def send(self) -> None:
        """Send as much as does not block."""
        with suppress(BlockingIOError):
            while self.outbox:
                del self.outbox[: self.link.send(self.outbox[:CHUNK])]

    def forward(self, fd: int) -> bool:
        """Forward data of a pipe; False at its end, or if it is empty."""
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
        """Execute the launcher's messages; False when it dismisses this agent."""
        with suppress(BlockingIOError):
            data = self.link.recv(CHUNK)
            for kind, body in self.inbox.feed(data):
                if kind == messages.SIGNAL and self.rank and not self.exit_told:
                    with suppress(ProcessLookupError):
                        self.rank.send(int(messages.read_json(body)["number"]))
            return bool(data)
        return True

    def look_after(self) -> None:
        """Report the rank's end, after its output."""
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
        """Forward until the launcher dismisses this agent, or is lost."""
        self.selector.register(alarm, selectors.EVENT_READ)
        self.selector.register(self.link, selectors.EVENT_READ)
        for fd in self.pipes:
            self.selector.register(fd, selectors.EVENT_READ)
        with suppress(ConnectionError, TimeoutError):
            while self.wait(alarm):
                self.look_after()

    def wait(self, alarm: int) -> bool:
        """Wait for an event and handle it; False when the launcher dismisses this agent."""
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
        """Stop or resume reading from a pipe."""
        watched = fd in self.selector.get_map()
        if watched and wanted:
            self.selector.unregister(fd)
        elif not watched and not wanted:
            self.selector.register(fd, selectors.EVENT_READ)

    def close(self) -> None:
        """End the rank's processes, and send the rest of its output."""
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
    """Read from a pipe; empty at its end, or if it has no data."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return b""


@contextmanager
def woken(forwarder: IoForwarder) -> Iterator[int]:
    """A pipe that is readable when a child ends; mpirun's SIGTERM dismisses the agent."""

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
    """Do nothing; unlike SIG_IGN, a handler is not inherited by the rank."""
