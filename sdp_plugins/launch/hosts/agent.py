"""The process that mpirun starts for every rank: it starts the rank and connects it to `sdp run`.

It runs until `sdp run` dismisses it or is lost; then it ends the rank with all processes that the
rank has started. Its exit code is always 0, because mpirun would end the other ranks at once, which
is the task of `sdp run`. The rank inherits the descriptors by which it talks to mpirun.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from sdp_plugins.core.addresses_and_ports import free_port
from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology
from sdp_plugins.launch.binding import undo_one_core_binding
from sdp_plugins.launch.hosts import agent_messages
from sdp_plugins.launch.hosts.agent_messages import TOKEN
from sdp_plugins.launch.numa import cores_of_ranks
from sdp_plugins.launch.output import CHUNK
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process

CONNECT_S = 10.0
START_S = 120.0
FLUSH_S = 1.0  # limit for each thread to send what is left when the rank's processes have ended


class IoForwarder:
    """Forwards between a rank and the launcher.

    The thread that calls `serve` executes the launcher's messages. One thread forwards each pipe,
    and one waits for the end of the rank. While the launcher does not read, these three wait for
    it, and so does a rank that writes more. `close` also closes the connection to the launcher.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._received()
        self._sending = threading.RLock()  # held from reading a pipe to sending what was read
        self._threads: list[threading.Thread] = []
        self._rank: RankProcess | None = None
        self._closing = False
        self._reaper = Reaper()

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Leave when mpirun ends this agent, as if the launcher had dismissed it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def ask(self, hello: Mapping[str, object]) -> Any:
        """Introduce this agent; returns the launcher's START once all agents have connected.

        Raises:
            OSError: The launcher does not answer, or has closed the connection.
        """
        self._connection.settimeout(START_S)
        self.send(agent_messages.HELLO, hello)
        for kind, body in self._messages:
            if kind == agent_messages.START:
                self._connection.settimeout(None)
                return agent_messages.read_json(body)
        raise ConnectionResetError("sdp run has closed the connection")

    def _received(self) -> Iterator[tuple[bytes, bytes]]:
        """The launcher's messages, until it dismisses this agent."""
        inbox = agent_messages.Inbox(agent_messages.LONGEST)
        while data := self._connection.recv(CHUNK):
            yield from inbox.feed(data)

    def send(self, kind: bytes, body: object) -> None:
        """Send a message; `serve` detects a lost connection."""
        with self._sending, suppress(OSError):
            self._connection.sendall(agent_messages.message(kind, body))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], cores: Iterable[int]
    ) -> None:
        """Start the rank's program.

        Args:
            command: Its command line.
            environment: All of its variables.
            cores: Those that it may use.

        Raises:
            OSError, subprocess.SubprocessError: It cannot be started.
        """
        setup = child_setup(set(), cores)
        rank = start_process(command, environment, setup, stdin=False, inherit=True)
        self._rank = rank
        self._reaper.watch(rank.pid)
        self.send(agent_messages.STARTED, {"pid": rank.pid})
        pipes = {rank.stdout: agent_messages.STDOUT, rank.stderr: agent_messages.STDERR}
        for fd, kind in pipes.items():
            os.set_blocking(fd, False)
            self._run(self._forward, fd, kind)
        self._run(self._report_end, rank, pipes)

    def _run(self, function: Callable[..., object], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        # The kernel may give a signal to any thread that does not block it; only the main thread's
        # wait ends by one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _forward(self, fd: int, kind: bytes) -> None:
        """Forward a pipe until its end."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while poll.poll() and self._forward_available(fd, kind):
            pass

    def _forward_available(self, fd: int, kind: bytes) -> bool:
        """Forward what a pipe holds; False at its end."""
        with self._sending:
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return True
            if data:
                self.send(kind, data)
            return bool(data)

    def _report_end(self, rank: RankProcess, pipes: Mapping[int, bytes]) -> None:
        """Report the rank's end, after its output; processes that it has started may go on."""
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        with self._sending:
            for fd, kind in pipes.items():
                self._forward_available(fd, kind)
            if not self._closing:  # else it was killed, which is not its own exit code
                exit_code, error = rank.exit_code(), rank.error_file.read()
                self.send(agent_messages.EXIT, {"code": exit_code, "error": error})

    def serve(self) -> None:
        """Execute the launcher's messages until it dismisses this agent, or is lost."""
        with suppress(ConnectionError, TimeoutError):
            for kind, body in self._messages:
                if kind == agent_messages.SIGNAL and self._rank:
                    with suppress(ProcessLookupError):
                        self._rank.send(int(agent_messages.read_json(body)["number"]))

    def close(self) -> None:
        """End the rank's processes, and send the rest of its output."""
        self._closing = True
        if self._rank:
            kill_sessions({self._rank.pid})
            for thread in self._threads:
                thread.join(FLUSH_S)
            self._rank.close()
        self._reaper.dismiss()
        self._connection.close()


def fail(text: str) -> NoReturn:
    """End before the launcher is reached; mpirun forwards the text."""
    raise SystemExit(f"sdp run: {text}")


def connected(launcher: str) -> socket.socket:
    """Connect to the launcher by the first address that works."""
    port, _, addresses = launcher.partition("@")
    reasons = []
    for address in addresses.split(","):
        try:
            connection = socket.create_connection((address, int(port)), CONNECT_S)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            connection.settimeout(None)
            agent_messages.keep_alive(connection)
            return connection
    fail(
        f"{socket.gethostname()} cannot reach sdp run on port {port} ({'; '.join(reasons)}). "
        "Hint: firewalls must allow TCP between the hosts."
    )


def run(launcher: str, master_port: int, token: str) -> int:
    """Be the agent of one rank.

    Args:
        launcher: The port and the addresses of the launcher, PORT@ADDRESS,ADDRESS.
        master_port: MASTER_PORT on rank 0's host; 0: a free port.
        token: Proves that this agent belongs to the launcher's job.
    """
    topology = Topology.from_env()
    if topology.source == "single":
        fail("mpirun has given this process no rank. Hint: choose another MPI's with --mpirun.")
    if not token:
        fail(f"mpirun has not forwarded {TOKEN}. Hint: choose another with --mpirun.")
    if topology.source == "openmpi":
        undo_one_core_binding(os.environ)
    host = socket.gethostname()
    forwarder = IoForwarder(connected(launcher))
    signal.signal(signal.SIGTERM, forwarder.on_sigterm)
    hello = {"token": token, "rank": topology.rank, "host": host}
    try:
        hello["master_port"] = free_port("", master_port) if topology.rank == 0 else 0
    except OSError as error:
        hello["refused"] = (
            f"MASTER_PORT {master_port} on {host}: {error.strerror}. "
            "Hint: choose another --master-port, or leave it out to get a free port."
        )
    try:
        start = forwarder.ask(hello)
        given = {**os.environ, **start["variables"]}
        cores = cores_of_ranks(topology.local_size, given)[topology.local_rank]
        forwarder.start(start["command"], rank_environment(topology, given), cores)
        forwarder.serve()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no thread
        forwarder.send(agent_messages.REFUSED, f"{host} cannot start its rank: {error}".encode())
    finally:
        forwarder.close()
    return 0


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # `sdp run` handles them
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which ranks inherit
    token = os.environ.pop(TOKEN, "")
    launcher, master_port = sys.argv[1:]
    sys.exit(run(launcher, int(master_port), token))
