"""The launcher's view of a rank on a host: a connection to the rank's agent."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from sdp_plugins.core.error_file import RankError
from sdp_plugins.launch.hosts import agent_messages
from sdp_plugins.launch.output import CHUNK
from sdp_plugins.launch.worker_group import RankOutput

KILL_S = 5.0  # after SIGKILL, until an agent that has not answered counts as lost
KILLED = 128 + signal.SIGKILL
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)


class RemoteRank:
    """A rank, whose agent may not have connected yet, or may be lost."""

    def __init__(self, output: RankOutput) -> None:
        self.host = ""  # the host's own name
        self.address = ""  # from which its agent connected
        self.variables: dict[str, str] = {}  # for its environment
        self.output = output
        self.agent: AgentConnection | None = None
        self.pid: int | None = None
        self.lost_at: float | None = None  # when the agent was lost without an exit code
        self.code: int | None = None  # its exit code, or the replacement if the agent is lost
        self.kill_by: float | None = None
        self._error: RankError | None = None

    def anew(self, code: int) -> RemoteRank:
        """Return the same rank, with an exit code, and before an agent has connected for it."""
        rank = RemoteRank(self.output)
        rank.host, rank.address, rank.variables = self.host, self.address, self.variables
        rank.code = code
        return rank

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
        if self.code is None and self.is_silent:
            self.code = KILLED
        return self.code

    def error(self) -> RankError | None:
        """The exception that ended it, as its agent reported."""
        return self._error

    def send(self, number: int) -> None:
        """Make the agent send a signal."""
        if number == signal.SIGKILL and self.kill_by is None:
            self.kill_by = time.monotonic() + KILL_S
        if self.agent and self.started:
            self.agent.send(agent_messages.SIGNAL, {"number": number})
        elif not self.started and number in ENDING:
            self.code = 128 + number  # it will not start

    @property
    def is_silent(self) -> bool:
        """Whether its agent has not answered SIGKILL in time."""
        return self.kill_by is not None and time.monotonic() >= self.kill_by

    def start(self, order: object) -> None:
        """Make the agent start its program, again if it has ended."""
        self.pid = self.code = self._error = self.kill_by = None
        for stream in self.output:
            stream.flush()
        if self.agent:
            self.agent.send(agent_messages.START, order)
        else:
            self.lost_at = time.monotonic()

    def receive(self, kind: bytes, body: bytes) -> None:
        """Handle a message of the agent."""
        if kind == agent_messages.STDOUT:
            self.output.stdout.feed(body)
        elif kind == agent_messages.STDERR:
            self.output.stderr.feed(body)
        elif kind == agent_messages.STARTED:
            self.pid = int(agent_messages.read_json(body)["pid"])
        elif kind == agent_messages.EXIT:
            told = agent_messages.read_json(body)
            self.code, self._error = int(told["code"]), RankError.parse(told["error"])

    def held_back(self) -> bool:
        """Whether it must wait for the reader of the launcher's output."""
        return self.kill_by is None and any(stream.held_back() for stream in self.output)

    def disconnected(self) -> None:
        """Handle the loss of the agent."""
        self.agent = None
        for stream in self.output:
            stream.flush()
        if self.code is None:
            self.lost_at = time.monotonic()


class AgentConnection:
    """A connection, which belongs to an agent once it has sent the job's token.

    `receive` handles its first message, and what is about more than its rank.
    """

    def __init__(
        self,
        connection: socket.socket,
        receive: Callable[[AgentConnection, bytes, bytes], None],
    ) -> None:
        connection.setblocking(False)
        agent_messages.keep_alive(connection)
        self.connection = connection
        self.fd = connection.fileno()
        self.rank: RemoteRank | None = None
        self.ended = False
        self.dismissed = False
        self.inbox = agent_messages.Inbox(agent_messages.LONGEST_HELLO)
        self._receive = receive

    def held_back(self) -> bool:
        """Whether reading is paused."""
        return self.rank is not None and not self.dismissed and self.rank.held_back()

    def read_ready(self) -> bool:
        """Handle the messages; False when the connection has ended."""
        try:
            self.ended = not self._take(os.read(self.fd, CHUNK))
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError):  # lost, or not an agent
            self.ended = True
        if self.ended and self.rank:
            self.rank.disconnected()
        elif self.ended:
            self.dismiss()
        return not self.ended

    def _take(self, data: bytes) -> bool:
        for kind, body in self.inbox.feed(data):
            if self.rank is None or kind in (agent_messages.REFUSED, agent_messages.ROSTER):
                self._receive(self, kind, body)
            else:
                self.rank.receive(kind, body)
        return bool(data)

    def send(self, kind: bytes, body: object) -> None:
        """Send a short message; a lost connection is detected elsewhere."""
        with suppress(OSError):
            self.connection.send(agent_messages.message(kind, body))

    def dismiss(self) -> None:
        """Make the agent end its rank, send the remaining output, and exit."""
        self.dismissed = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
