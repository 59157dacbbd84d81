"""Forwards output, signals and exit code between one rank and the launcher."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NamedTuple

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.hosts import messages
from sdp_plugins.launch.output import CHUNK, Pipe, Sink
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process

START_S = 120.0
LAST_WORDS_S = 1.0  # to send the rest of the output when the rank has ended


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
        self.fd = link.fileno()
        self.inbox = messages.Inbox()
        self.inbox.longest = messages.LONGEST
        self.sink = Sink(os.dup(self.fd))  # the loop watches each descriptor for one thing
        self.loop = EventLoop(self.sink)
        self.pipes: list[Pipe] = []
        self.rank: RankProcess | None = None
        self.exit_told = False
        self.dismissed = False
        self.reaper = Reaper()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave on mpirun's SIGTERM, as if the launcher had dismissed this agent."""
        if number == signal.SIGTERM:
            with suppress(OSError):
                self.link.shutdown(socket.SHUT_RD)

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
        for fd, kind in ((rank.stdout, messages.STDOUT), (rank.stderr, messages.STDERR)):
            self.pipes.append(Pipe(fd, partial(self.say, kind), lambda: self.sink.full))
            self.loop.add_source(self.pipes[-1])
        self.say(messages.STARTED, {"pid": rank.pid})

    def say(self, kind: bytes, body: object) -> None:
        """Send a message, now or later; none for the end of a pipe."""
        if body:
            self.sink.write(messages.message(kind, body))

    def held_back(self) -> bool:
        """Never: the launcher sends little."""
        return False

    def read_ready(self) -> bool:
        """Execute the launcher's messages; False when it dismisses this agent, or is lost."""
        try:
            data = self.link.recv(CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        for kind, body in self.inbox.feed(data):
            if kind == messages.SIGNAL and self.rank and not self.exit_told:
                with suppress(ProcessLookupError):
                    self.rank.send(int(messages.read_json(body)["number"]))
        self.dismissed = not data
        return bool(data)

    def serve(self) -> None:
        """Forward until the launcher dismisses this agent, or is lost."""
        self.loop.add_source(self)
        while not self.dismissed and self.sink.error is None:
            self.loop.run_once(None)
            self.look_after()

    def look_after(self) -> None:
        """Report the rank's end, after its output."""
        code = self.rank.exit_code() if self.rank else None
        if self.rank is None or code is None or self.exit_told:
            return
        self.exit_told = True
        self._read_pipes()
        self.say(messages.EXIT, {"code": code, "error": self.rank.error_file.read()})

    def _read_pipes(self) -> None:
        for pipe in self.pipes * 2:  # the data, then the end
            self.loop.read(pipe)

    def close(self) -> None:
        """End the rank's processes, and send the rest of its output."""
        if self.rank:
            kill_sessions({self.rank.pid})
            self._read_pipes()
            end = time.monotonic() + LAST_WORDS_S
            while self.loop.backlogged() and time.monotonic() < end:
                self.loop.run_once(end)
            self.rank.close()
        self.loop.close()
        self.reaper.dismiss()
        os.close(self.sink.fd)
        self.link.close()
