"""The process that each rank has on its host: it starts the rank and connects it to `sdp run`.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from sdp_plugins.core.addresses_and_ports import free_port
from sdp_plugins.core.config import ROSTER_FILE
from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.regroup.roster import Roster
from sdp_plugins.core.regroup.roster_file import RosterFile, note
from sdp_plugins.core.topology import Topology
from sdp_plugins.launch.binding import undo_one_core_binding
from sdp_plugins.launch.hosts import agent_messages
from sdp_plugins.launch.hosts.agent_messages import TOKEN
from sdp_plugins.launch.job_environment import shared_malloc
from sdp_plugins.launch.numa import cores_of_ranks
from sdp_plugins.launch.output import CHUNK
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process

CONNECT_S = 10.0
START_S = 120.0
LOOK_S = 0.1  # between two reads of an elastic rank's rosters
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
        self._rosters, self._latest_view = RosterFile(), -1

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Leave when mpirun ends this agent, as if the launcher had dismissed it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def introduce(self, hello: Mapping[str, object]) -> None:
        """Introduce this agent; the launcher answers once all agents have connected."""
        self._connection.settimeout(START_S)
        self.send(agent_messages.HELLO, hello)

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
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Iterable[int],
        elastic: bool,
    ) -> None:
        """Start the rank's program; the one before, if there was one, has ended.

        Args:
            command: Its command line.
            environment: All of its variables.
            cores: Those that it may use.
            elastic: Whether it makes rosters.

        Raises:
            OSError, subprocess.SubprocessError: It cannot be started.
        """
        self._end_rank()
        setup = child_setup(set(), cores)
        environment = {**environment, **shared_malloc(environment)}
        if elastic:
            environment[ROSTER_FILE] = self._rosters.path
        rank = start_process(command, environment, setup, stdin=subprocess.DEVNULL, inherit=True)
        self._rank = rank
        self._reaper.watch(rank.pid)
        self.send(agent_messages.STARTED, {"pid": rank.pid})
        pipes = {rank.stdout: agent_messages.STDOUT, rank.stderr: agent_messages.STDERR}
        for fd, kind in pipes.items():
            os.set_blocking(fd, False)
            self._run(self._forward, fd, kind)
        self._run(self._report_end, rank, pipes)
        if elastic:
            self._run(self._tell_rosters, rank)

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
            self._send_rosters()
            if not self._closing:  # else it was killed, which is not its own exit code
                exit_code, error = rank.exit_code(), rank.error_file.read()
                self.send(agent_messages.EXIT, {"code": exit_code, "error": error})

    def serve(self, start: Callable[[Any], None]) -> None:
        """Execute the launcher's messages until it dismisses this agent, or is lost.

        Args:
            start: Called with the body of START.
        """
        with suppress(ConnectionError, TimeoutError):
            for kind, body in self._messages:
                if kind == agent_messages.START:
                    self._connection.settimeout(None)
                    start(agent_messages.read_json(body))
                elif kind == agent_messages.ROSTER:
                    self._take_roster(Roster.from_json(agent_messages.read_json(body)))
                elif kind == agent_messages.SIGNAL and self._rank:
                    with suppress(ProcessLookupError):
                        self._rank.send(int(agent_messages.read_json(body)["number"]))

    def _take_roster(self, roster: Roster) -> None:
        """Note a roster that ranks of other hosts have made, for one that joins here."""
        self._latest_view = max(self._latest_view, roster.view)
        note(self._rosters.path, roster)

    def _tell_rosters(self, rank: RankProcess) -> None:
        """Send the rosters of groups that the rank leads, as long as it runs."""
        while rank.exit_code() is None:
            self._send_rosters()
            time.sleep(LOOK_S)

    def _send_rosters(self) -> None:
        with self._sending:
            for roster in self._rosters.new():
                if roster.view > self._latest_view:
                    self._latest_view = roster.view
                    self.send(agent_messages.ROSTER, roster.to_json())

    def _end_rank(self) -> None:
        """End the rank's processes, and send the rest of its output."""
        if self._rank:
            kill_sessions({self._rank.pid})
            for thread in self._threads:
                thread.join(FLUSH_S)
            self._rank.close()
        self._rank, self._threads = None, []

    def close(self) -> None:
        """End the rank, and leave."""
        self._closing = True
        self._end_rank()
        self._rosters.close()
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

    def start(told: Any) -> None:
        given = {**os.environ, **told["variables"]}
        cores = cores_of_ranks(topology.local_size, given)[topology.local_rank]
        environment = rank_environment(topology, given)
        forwarder.start(told["command"], environment, cores, told["elastic"])

    try:
        forwarder.introduce(hello)
        forwarder.serve(start)
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
