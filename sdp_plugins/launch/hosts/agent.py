"""What mpirun starts for every rank: starts the rank, and stands between it and `sdp run`.

It goes on until `sdp run` lets it go, or is lost; then it ends the rank with all that this has
started. It ends with 0 whatever becomes of the rank: so mpirun, which would end the others at once,
leaves that to `sdp run`. What it inherits for talking to mpirun it hands on to the rank.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple, NoReturn

from sdp_plugins.core.internode import mpi_library
from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology
from sdp_plugins.launch.binding import undo_one_core_binding
from sdp_plugins.launch.hosts import messages
from sdp_plugins.launch.pump import empty
from sdp_plugins.launch.sessions import Guardian, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process

CONNECT_S = 10.0
START_S = 120.0
CHUNK = 1 << 16
OUTBOX_LIMIT = 1 << 20  # beyond it the rank has to wait for the launcher
SINGLE = "mpirun has told this process no rank"


class Options(argparse.Namespace):
    """The command line.

    Attributes:
        launcher: The addresses by which the launcher may be reached, and its port.
        master_port: Wanted on rank 0's host; 0: one that is free.
        job: Its id.
        command: The rank's command line.
    """

    launcher: str
    master_port: int
    job: str
    command: list[str]


def parsed(given: Sequence[str]) -> Options:
    """Read the command line that `sdp run` has written."""
    parser = argparse.ArgumentParser(prog="sdp run's agent", allow_abbrev=False)
    parser.add_argument("--launcher", required=True, metavar="PORT@ADDRESS,ADDRESS")
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(given, Options())


def give_up(text: str) -> NoReturn:
    """End before the launcher is reached: mpirun passes on what we say."""
    raise SystemExit(f"sdp run: {text}")


def connected(launcher: str) -> socket.socket:
    """A connection with the launcher, by the first address that works."""
    port, _, addresses = launcher.partition("@")
    reasons = []
    for address in addresses.split(","):
        try:
            link = socket.create_connection((address, int(port)), CONNECT_S)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            link.settimeout(None)
            messages.keep_alive(link)
            return link
    give_up(
        f"{socket.gethostname()} cannot reach sdp run on port {port} ({'; '.join(reasons)}). "
        "Hint: let a firewall pass TCP between the hosts."
    )


def free_port(wanted: int) -> int:
    """A TCP port of this host: the wanted one, if it is free, or any.

    Raises:
        OSError: It is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted))
        port: int = probe.getsockname()[1]
        return port


class Start(NamedTuple):
    """What only the launcher knows, when all agents have called.

    Attributes:
        master_addr: Of rank 0's host.
        master_port: On that.
        node: The index of our host.
        nodes: How many there are.
    """

    master_addr: str
    master_port: int
    node: int
    nodes: int


def variables(
    job: str, topology: Topology, start: Start, given: Mapping[str, str]
) -> dict[str, str]:
    """The rank's environment.

    TORCHELASTIC_RUN_ID makes torch and Lightning recognise the job; it also says that ranks are not
    MPI's, so it is set only where they cannot be.
    """
    ours = {
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "NODE_RANK": str(start.node),
        "GROUP_RANK": str(start.node),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "SDP_JOB_ID": job,
    }
    if not mpi_library.installed():
        ours |= {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": "0"}
        ours["TORCHELASTIC_MAX_RESTARTS"] = "0"
    return rank_environment(topology, {**given, **ours})


class Agent:
    """One rank and the connection about it."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.inbox = messages.Inbox()
        self.outbox = bytearray()
        self.selector = selectors.DefaultSelector()
        self.rank: RankProcess | None = None
        self.pipes: dict[int, bytes] = {}  # the rank's output: what kind it is
        self.exit_told = False
        self.guardian = Guardian()

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
        self.guardian.watch(rank.pid)
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

    def relay(self, fd: int) -> bool:
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

    def listen(self) -> bool:
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
            while fd in self.pipes and self.relay(fd):
                pass
        self.exit_told = True
        self.say(messages.EXIT, {"code": code})

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
                self.relay(key.fd)
            elif events & selectors.EVENT_READ and not self.listen():
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
        self.guardian.dismiss()
        self.link.close()


def read_now(fd: int) -> bytes:
    """What a pipe has; nothing at its end, or if it is empty."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return b""


def run(options: Options, token: str) -> int:
    """Be the agent of one rank."""
    topology = Topology.from_env()
    if topology.source == "single":
        give_up(f"{SINGLE}. Hint: does the mpirun belong to another MPI than it says?")
    if not token:
        give_up(f"mpirun has not passed on {messages.TOKEN}. Hint: --mpirun takes another one.")
    if topology.source == "openmpi":
        undo_one_core_binding(os.environ)
    agent = Agent(connected(options.launcher))
    hello = {"token": token, "rank": topology.rank, "host": socket.gethostname()}
    try:
        first = topology.rank == 0
        hello["master_port"] = free_port(options.master_port) if first else 0
    except OSError as error:
        hello["refused"] = (
            f"MASTER_PORT {options.master_port} on {socket.gethostname()}: {error.strerror}. "
            "Hint: --master-port takes another, or leave it out for one that is free."
        )
    try:
        environment = variables(options.job, topology, agent.ask(hello), os.environ)
        with woken(agent) as alarm:
            agent.start(options.command, environment)
            agent.serve(alarm)
    except (OSError, subprocess.SubprocessError) as error:
        agent.refuse(f"{socket.gethostname()} cannot start {options.command[0]!r}: {error}")
    finally:
        agent.close()
    return 0


@contextmanager
def woken(agent: Agent) -> Iterator[int]:
    """A pipe that has something when a child ends; mpirun's SIGTERM is as good as a farewell."""

    def leave(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            agent.link.shutdown(socket.SHUT_RD)

    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, nothing)
    signal.signal(signal.SIGTERM, leave)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    yield reader


def nothing(number: int, frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which the rank would inherit."""


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGHUP):  # `sdp run` passes them on
        signal.signal(number, nothing)
    token = os.environ.pop(messages.TOKEN, "")
    sys.exit(run(parsed(sys.argv[1:]), token))


if __name__ == "__main__":
    main()
