"""The ranks of a job on a list of hosts: mpirun starts their agents, which connect here."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.hosts import addresses, agent_messages
from sdp_plugins.launch.hosts.diagnosis import explained
from sdp_plugins.launch.hosts.host_job import HostPlan
from sdp_plugins.launch.hosts.remote_rank import AgentConnection, RemoteRank
from sdp_plugins.launch.job_environment import torchelastic
from sdp_plugins.launch.output import Pipe
from sdp_plugins.launch.report import how_it_ended
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process
from sdp_plugins.launch.worker_group import Ending, RankOutput, WorkerGroup

START_S = 120.0  # limit for all agents to connect
LOST_S = 5.0  # from the loss of an agent to that of its rank: mpirun may report more
MOST_UNKNOWN = 64  # connections that have not sent the token yet
END_S = 5.0  # limit for mpirun to end after its agents
TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)|\(rank (\d+) in comm 0\): .*MPI_Abort")


class RemoteRanks(WorkerGroup):
    """A worker group on hosts."""

    def __init__(self, plan: HostPlan) -> None:
        self.world_size = sum(plan.places.values())
        self.ranks: list[RemoteRank] = []
        self.plan = plan
        self.connections: list[AgentConnection] = []
        self.connected = 0  # agents that have connected
        self.refusal = ""
        self.listener: socket.socket | None = None
        self.mpirun: RankProcess | None = None
        self.reaper: Reaper | None = None

    def start(
        self,
        loop: EventLoop,
        output: Sequence[RankOutput],
        mask: Iterable[int],
        is_over: Callable[[], bool],
    ) -> bool:
        """Start mpirun; the ranks follow."""
        self.reaper, self.loop = Reaper(TERMINATE_S), loop
        self.ranks = [RemoteRank(streams) for streams in output]
        self.listener = listener(self.plan.addresses)
        loop.add_alarm(self.listener.fileno(), partial(self.accept, self.listener))
        self.start_by = time.monotonic() + START_S
        command = self.plan.command(self.listener.getsockname()[1])
        # On SIGTERM mpirun removes its files and ends its daemons.
        setup = child_setup(mask, death_signal=signal.SIGTERM)
        self.mpirun = start_process(command, self.plan.environment, setup, stdin=False)
        self.reaper.watch(self.mpirun.pid)
        self.mpirun_output = loop.add_stream("[mpirun] ", output[0].stderr.sink)
        self.mpirun_output.hidden = True  # until the ranks run: a failure has its own report
        self.mpirun_pipes = [
            Pipe(fd, self.mpirun_output.feed) for fd in (self.mpirun.stdout, self.mpirun.stderr)
        ]
        for pipe in self.mpirun_pipes:
            loop.add_source(pipe)
        return True

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection; its first message identifies it."""
        for connection in [connection for connection in self.connections if connection.ended]:
            self._drop(connection)
        unknown = [connection for connection in self.connections if connection.rank is None]
        if len(unknown) >= MOST_UNKNOWN:  # some may be agents, so drop only the oldest
            self._drop(unknown[0])
        try:
            connection = AgentConnection(listener.accept()[0], self.receive)
        except OSError:  # it has closed, or no descriptor is left
            if unknown:
                self._drop(unknown[0])
            return
        self.connections.append(connection)
        self.loop.add_source(connection)

    def _drop(self, connection: AgentConnection) -> None:
        self.loop.drop_source(connection)
        connection.connection.close()
        self.connections.remove(connection)

    def receive(self, agent: AgentConnection, kind: bytes, body: bytes) -> None:
        """Handle an agent's first message or its refusal; when all have connected, start the ranks.

        Raises:
            ValueError: The connection is not from an agent of this job.
        """
        if kind == agent_messages.REFUSED and agent.rank:
            self.refusal = self.refusal or body.decode(errors="replace")
            return
        hello = agent_messages.read_json(body)
        if kind != agent_messages.HELLO or not secrets.compare_digest(
            hello["token"], self.plan.token
        ):
            raise ValueError("not an agent of this job")
        rank = self.ranks[hello["rank"]]
        agent.rank, rank.agent = rank, agent
        agent.inbox.longest = agent_messages.LONGEST
        rank.host, rank.address = hello["host"], addresses.peer(agent.connection)
        for stream in rank.output:
            stream.source = agent
        self.refusal = self.refusal or hello.get("refused", "")
        self.connected += 1
        if hello["rank"] == 0:
            self.master_port = hello["master_port"]
        if self.connected == self.world_size and not self.refusal:
            self._start_ranks()

    def _start_ranks(self) -> None:
        from sdp_plugins.core.internode import mpi_library  # takes long to import

        self.mpirun_output.hidden = False
        self._stop_listening()
        places = [(rank.host, rank.address) for rank in self.ranks]
        nodes = list(dict.fromkeys(places))
        shared = {
            "MASTER_ADDR": addresses.master_address([address for _, address in places]),
            "MASTER_PORT": str(self.master_port),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "SDP_JOB_ID": self.plan.job.job_id,
        }
        if not mpi_library.installed():  # with these variables, ranks would not use MPI
            shared |= torchelastic(self.plan.job.job_id)
        for rank, place in zip(self.ranks, places, strict=True):
            node = str(nodes.index(place))
            variables = shared | {"NODE_RANK": node, "GROUP_RANK": node}
            if rank.agent:
                command = list(self.plan.job.command)
                rank.agent.send(agent_messages.START, {"command": command, "variables": variables})

    def _stop_listening(self) -> None:
        if self.listener:
            self.loop.drop_alarm(self.listener.fileno())
            self.listener.close()
            self.listener = None

    def note_losses(self) -> None:
        """Give an exit code to ranks whose agents are lost, or that mpirun did not start."""
        if self.mpirun is None:
            return
        code = self.mpirun.exit_code()
        not_started = code is not None and self.connected < self.world_size
        for rank in self.ranks if not_started else self._lost(code).values():
            if rank.code is None:
                rank.code = code or 1

    def _lost(self, code: int | None) -> dict[int, RemoteRank]:
        """The ranks whose agents were lost, once mpirun has ended or had time to report."""
        lost = {n: rank for n, rank in enumerate(self.ranks) if rank.lost_at is not None}
        first = min((rank.lost_at or 0.0 for rank in lost.values()), default=0.0)
        may_wait = code is None and time.monotonic() < first + LOST_S
        return {} if may_wait else lost

    def launch_failure(self) -> Ending | None:
        """Why the job cannot continue: a refusal, the end of mpirun, or the limit for starting."""
        if self.mpirun is None:  # the job has ended: only output is left
            return None
        if self.refusal:
            return Ending(self.refusal)
        code = self.mpirun.exit_code()
        if self.connected == self.world_size:
            return self._why_lost(code)
        if code is not None:
            return Ending(self._why_not_started(code))
        if complaint := self._agents_complaint():  # after which MPICH's mpirun does not end
            return Ending(complaint)
        if time.monotonic() < self.start_by:
            return None
        here = ", ".join(dict.fromkeys(rank.host for rank in self.ranks if rank.host))
        return Ending(
            f"{self.world_size - self.connected} of {self.world_size} ranks did not start in "
            f"{START_S:.0f} s ({f'those on {here} did' if here else 'none did'}). Hint: "
            "firewalls must allow TCP between the hosts."
        )

    def _why_lost(self, code: int | None) -> Ending | None:
        """Why agents were lost, or mpirun has ended; None if neither is so."""
        lost = self._lost(code)
        if not lost and code is not None:
            how = how_it_ended(code)
            return Ending(
                f"mpirun has ended before the ranks: {how}. Hint: check whether it was killed.", 1
            )
        if not lost:
            return None
        self._read_mpirun()
        said = [self.mpirun_output.text(), *(rank.output.stderr.text() for rank in self.ranks)]
        if aborted := next((found for text in said if (found := ABORTED.search(text))), None):
            number = aborted.group(1) or aborted.group(2)
            return Ending(
                f"rank {number} called MPI_Abort, and mpirun ended the others.", code or 1
            )
        which = ", ".join(f"{number} (on {rank.host})" for number, rank in lost.items())
        return Ending(
            f"rank {which} ended without an exit code. Hint: it called MPI_Abort, its agent was "
            "killed, or its host is down; see mpirun's output above.",
            code or 1,
        )

    def _read_mpirun(self) -> None:
        for pipe in self.mpirun_pipes:
            self.loop.read(pipe)

    def _why_not_started(self, code: int) -> str:
        """Why mpirun could not start the ranks, in one line if the error is known."""
        self._read_mpirun()
        if complaint := self._agents_complaint():
            return complaint
        text = self.mpirun_output.text()
        pairs = zip(self.plan.places, self.plan.addresses, strict=True)
        others = [host for host, address in pairs if not addresses.is_here(address)]
        named = next((host for host in others if host in text), ", ".join(others) or "this host")
        if known := explained(text, named):
            return known
        self.mpirun_output.reveal()
        return f"{self.plan.mpirun} could not start the ranks: exit code {code}; see above."

    def _agents_complaint(self) -> str:
        """The error of an agent that did not reach the launcher; empty if there is none."""
        lines = self.mpirun_output.text().splitlines(keepends=True)
        ours = [line for line in lines if "sdp run: " in line and line.endswith("\n")]
        return ours[-1].partition("sdp run: ")[2].strip() if ours else ""

    def due(self) -> float | None:
        """When the limit for starting ends, or a lost rank is given up."""
        times = [rank.kill_by for rank in self.ranks if rank.kill_by is not None]
        times += [rank.lost_at + LOST_S for rank in self.ranks if rank.lost_at is not None]
        if self.connected < self.world_size:
            times.append(self.start_by)
        now = time.monotonic()
        return min((when for when in times if when > now), default=None)

    def kill(self) -> None:
        """Dismiss the agents, which end their ranks; mpirun should then end."""
        if self.mpirun is None:
            return
        self._stop_listening()  # an agent that connects now would start its rank
        self.mpirun_output.hidden = True  # or its messages about the ends would come last
        for connection in self.connections:
            connection.dismiss()
        if self.connected == self.world_size and self._ends(END_S):
            return
        self.mpirun.send(signal.SIGTERM)
        if not self._ends(TERMINATE_S):
            kill_sessions({self.mpirun.pid})

    def _ends(self, timeout_s: float) -> bool:
        """Whether mpirun ends in time; its output is shown meanwhile."""
        assert self.mpirun
        end = time.monotonic() + timeout_s
        while self.mpirun.exit_code() is None and time.monotonic() < end:
            self.loop.run_once(end)
        return self.mpirun.exit_code() is not None

    def reap(self) -> None:
        """Reap mpirun and close the connections."""
        if self.mpirun:
            kill_sessions({self.mpirun.pid})
            self.mpirun.close()
            self.mpirun = None
        for connection in self.connections:
            connection.connection.close()
        if self.reaper:
            self.reaper.dismiss()
            self._stop_listening()


def listener(hosts: Sequence[str]) -> socket.socket:
    """The socket to which agents connect; open to other hosts only if there are any."""
    if all(addresses.is_here(address) for address in hosts):
        found = socket.create_server((LOOPBACK, 0), backlog=1024)
    else:
        both = any(":" in address for address in hosts) and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        found = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    found.setblocking(False)
    return found
