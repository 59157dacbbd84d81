"""A program that starts agents, as a child of the launcher: mpirun, or ssh to one host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.hosts.host_job import AgentStart
from sdp_plugins.launch.output import Pipe, Sink
from sdp_plugins.launch.sessions import kill_sessions
from sdp_plugins.launch.spawn import child_setup, start_process


class Starter:
    """The program while it runs.

    Attributes:
        ranks: Those whose agents it starts.
        output: All that it writes, hidden until the ranks run: a failure has its own report.

    Args:
        start: What it is.
        environment: All of its variables.
        loop: Reads its output.
        sink: Where that goes.
        mask: Signals that stay blocked in it.

    Raises:
        OSError, subprocess.SubprocessError: It cannot be started.
    """

    def __init__(
        self,
        start: AgentStart,
        environment: Mapping[str, str],
        loop: EventLoop,
        sink: Sink,
        mask: Iterable[int],
    ) -> None:
        self.name, self.ranks, self._loop = start.name, start.ranks, loop
        # On SIGTERM mpirun removes its files and ends its daemons.
        setup = child_setup(mask, death_signal=signal.SIGTERM)
        stdin = os.memfd_create("sdp-agents", os.MFD_CLOEXEC)
        try:
            os.write(stdin, start.stdin)
            os.lseek(stdin, 0, os.SEEK_SET)
            self._process = start_process(start.line, environment, setup, stdin=stdin)
        finally:
            os.close(stdin)
        self.pid = self._process.pid
        self.output = loop.add_stream(f"[{start.name}] ", sink)
        self.output.hidden = True
        fds = (self._process.stdout, self._process.stderr)
        self._pipes = [Pipe(fd, self.output.feed) for fd in fds]
        for pipe in self._pipes:
            loop.add_source(pipe)

    def exit_code(self) -> int | None:
        """Its exit code once it has ended; None before."""
        return self._process.exit_code()

    def read(self) -> str:
        """What it has written up to now."""
        for pipe in self._pipes:
            self._loop.read(pipe)
        return self.output.text()

    def complaint(self) -> str:
        """The error of an agent that did not reach the launcher; empty if there is none."""
        lines = self.output.text().splitlines(keepends=True)
        ours = [line for line in lines if "sdp run: " in line and line.endswith("\n")]
        return ours[-1].partition("sdp run: ")[2].strip() if ours else ""

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.send(signal.SIGTERM)

    def close(self) -> None:
        """Kill what is left of it, and reap it."""
        kill_sessions({self.pid})
        for pipe in self._pipes:
            self._loop.drop_source(pipe)
        self._loop.drop_stream(self.output)
        self._process.close()
