"""Ranks on other hosts, as the launcher sees them: each through a connection with its agent."""

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

KILL_S = 5.0  # so long after SIGKILL an agent that has not answered counts as gone
KILLED = 128 + signal.SIGKILL
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


class RemoteRank:
    """A rank: its agent may not have come yet, or be gone.

    Args:
        stdout: Where its output goes.
        stderr: The same.
    """

    def __init__(self, stdout: Stream, stderr: Stream) -> None:
        self.host = ""  # as it calls itself
        self.address = ""  # from which its agent has called
        self.streams = {messages.STDOUT: stdout, messages.STDERR: stderr}
        self.link: Link | None = None
        self.pid: int | None = None
        self.gone: float | None = None  # since when, without having told an exit code
        self.lost_code: int | None = None  # what then counts as its exit code
        self.kill_by: float | None = None
        self._code: int | None = None
        self._error: RankError | None = None

    @property
    def where(self) -> str:
        """Its process and host, for a report."""
        return f"pid {self.pid} on {self.host}" if self.pid else f"on {self.host}"

    @property
    def started(self) -> bool:
        """Whether its program runs, or has run."""
        return self.pid is not None

    def exit_code(self) -> int | None:
        """What its agent has told, or what stands for it if nobody will tell."""
        if self._code is None and self.kill_by is not None and time.monotonic() >= self.kill_by:
            self._code = KILLED
        return self.lost_code if self._code is None else self._code

    def error(self) -> RankError | None:
        """The exception that ended it, as its agent has told."""
        return self._error

    def send(self, number: int) -> None:
        """Have the agent send a signal."""
        if number == signal.SIGKILL and self.kill_by is None:
            self.kill_by = time.monotonic() + KILL_S
        if self.link and self.started:
            self.link.say(messages.SIGNAL, {"number": number})
        elif not self.started and number in ENDING:
            self.lost_code = 128 + number  # and it will not start any more

    def receive(self, kind: bytes, body: bytes) -> None:
        """Take what the agent says."""
        if kind in self.streams:
            self.streams[kind].feed(body)
        elif kind == messages.STARTED:
            self.pid = int(messages.read_json(body)["pid"])
        elif kind == messages.EXIT:
            told = messages.read_json(body)
            self._code, self._error = int(told["code"]), parsed(told["error"])

    def leave(self) -> None:
        """The agent has gone."""
        self.link = None
        for stream in self.streams.values():
            stream.flush()
        if self._code is None:
            self.gone = time.monotonic()


class Link:
    """A connection: an agent's, once it has said so.

    Args:
        connection: Accepted.
        meet: Takes an agent's first words, and its refusal.
        held_back: Whether output is not to be read for now.
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
        """Whether to read no further for now."""
        return self.rank is not None and self._held_back(self.rank)

    def read_ready(self) -> bool:
        """Take what the agent says; False when it has left."""
        try:
            self.ended = not self._take(os.read(self.fd, CHUNK))
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):  # lost, or a stranger
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
        """Say something short; who does not listen is gone, which is noticed elsewhere."""
        with suppress(OSError):
            self.connection.send(messages.message(kind, body))

    def let_go(self) -> None:
        """Have the agent end its rank, tell the rest, and leave."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
