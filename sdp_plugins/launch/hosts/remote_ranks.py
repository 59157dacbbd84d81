"""The launcher's view of ranks on hosts: each through a connection to its agent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from sdp_plugins.launch.error_file import RankError, parsed
from sdp_plugins.launch.hosts import messages
from sdp_plugins.launch.output import CHUNK, Stream

KILL_S = 5.0  # after SIGKILL, until an agent that has not answered counts as lost
KILLED = 128 + signal.SIGKILL
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


class RemoteRank:
    """A rank, whose agent may not have connected yet, or may be lost.

    Args:
        stdout: Stream of its stdout.
        stderr: Stream of its stderr.
    """

    def __init__(self, stdout: Stream, stderr: Stream) -> None:
        self.host = ""  # the host's own name
        self.address = ""  # from which its agent connected
        self.streams = {messages.STDOUT: stdout, messages.STDERR: stderr}
        self.link: Link | None = None
        self.pid: int | None = None
        self.gone: float | None = None  # when the agent was lost without an exit code
        self.lost_code: int | None = None  # its exit code in that case
        self.kill_by: float | None = None
        self._code: int | None = None
        self._error: RankError | None = None

    @property
    def where(self) -> str:
        """Description of its process and host, for reports."""
        return f"pid {self.pid} on {self.host}" if self.pid else f"on {self.host}"

    @property
    def started(self) -> bool:
        """Whether its program has been started."""
        return self.pid is not None

    def exit_code(self) -> int | None:
        """The exit code that its agent reported, or its replacement if the agent is lost."""
        if self._code is None and self.kill_by is not None and time.monotonic() >= self.kill_by:
            self._code = KILLED
        return self.lost_code if self._code is None else self._code

    def error(self) -> RankError | None:
        """The exception that ended it, as its agent reported."""
        return self._error

    def send(self, number: int) -> None:
        """Make the agent send a signal."""
        if number == signal.SIGKILL and self.kill_by is None:
            self.kill_by = time.monotonic() + KILL_S
        if self.link and self.started:
            self.link.say(messages.SIGNAL, {"number": number})
        elif not self.started and number in ENDING:
            self.lost_code = 128 + number  # it will not start

    def receive(self, kind: bytes, body: bytes) -> None:
        """Handle a message of the agent."""
        if kind in self.streams:
            self.streams[kind].feed(body)
        elif kind == messages.STARTED:
            self.pid = int(messages.read_json(body)["pid"])
        elif kind == messages.EXIT:
            told = messages.read_json(body)
            self._code, self._error = int(told["code"]), parsed(told["error"])

    def leave(self) -> None:
        """Handle the loss of the agent."""
        self.link = None
        for stream in self.streams.values():
            stream.flush()
        if self._code is None:
            self.gone = time.monotonic()


class Link:
    """A connection, which belongs to an agent once the token was checked.

    Args:
        connection: The accepted connection.
        meet: Handles an agent's first message and its refusal.
        held_back: Whether reading output is paused.
    """

    def __init__(
        self,
        connection: socket.socket,
        meet: Callable[[Link, bytes, bytes], None],
        held_back: Callable[[RemoteRank], bool],
    ) -> None:
        self.connection = connection
        self.fd = connection.fileno()
        self.rank: RemoteRank | None = None
        self.ended = False
        self.inbox = messages.Inbox()
        self._meet = meet
        self._held_back = held_back

    def held_back(self) -> bool:
        """Whether reading is paused."""
        return self.rank is not None and self._held_back(self.rank)

    def read_ready(self) -> bool:
        """Handle the agent's messages; False when the connection has ended."""
        try:
            self.ended = not self._take(os.read(self.fd, CHUNK))
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):  # lost, or not an agent
            self.ended = True
        if self.ended and self.rank:
            self.rank.leave()
        elif self.ended:
            self.let_go()
        return not self.ended

    def _take(self, data: bytes) -> bool:
        for kind, body in self.inbox.feed(data):
            if self.rank is None or kind == messages.REFUSED:
                self._meet(self, kind, body)
            else:
                self.rank.receive(kind, body)
        return bool(data)

    def say(self, kind: bytes, body: object) -> None:
        """Send a short message; a lost connection is detected elsewhere."""
        with suppress(OSError):
            self.connection.send(messages.message(kind, body))

    def let_go(self) -> None:
        """Make the agent end its rank, send the remaining output, and exit."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
