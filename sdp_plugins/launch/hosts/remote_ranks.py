"""The ranks of a job on a list of hosts: mpirun or ssh starts their agents, which connect here."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sdp_plugins.core.addresses_and_ports import LOOPBACK
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.hosts import addresses, agent_messages
from sdp_plugins.launch.hosts.diagnosis import explained
from sdp_plugins.launch.hosts.host_job import AgentStart, HostPlan
from sdp_plugins.launch.hosts.remote_rank import AgentConnection, RemoteRank
from sdp_plugins.launch.hosts.starter import Starter
from sdp_plugins.launch.job_environment import torchelastic
from sdp_plugins.launch.report import how_it_ended
from sdp_plugins.launch.sessions import Reaper, kill_sessions
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
        self.starters: list[Starter] = []
        self.reaper: Reaper | None = None

    def start(
        self,
        loop: EventLoop,
        output: Sequence[RankOutput],
        mask: Iterable[int],
        is_over: Callable[[], bool],
    ) -> bool:
        """Start mpirun, or ssh for each host; the ranks follow."""
        self.reaper, self.loop, self.mask = Reaper(TERMINATE_S), loop, mask
        self.ranks = [RemoteRank(streams) for streams in output]
        self.start_by = time.monotonic() + START_S
        for start in self.plan.starts(self.listen()):
            self.starters.append(self.start_agents(start))
        return True

    def listen(self) -> int:
        """Let agents connect.

        Returns:
            The port.
        """
        if self.listener is None:
            self.listener = listener(self.plan.addresses)
            self.loop.add_alarm(self.listener.fileno(), partial(self.accept, self.listener))
        return int(self.listener.getsockname()[1])

    def start_agents(self, start: AgentStart) -> Starter:
        """Start mpirun, or ssh for a host."""
        sink = self.ranks[0].output.stderr.sink
        starter = Starter(start, self.plan.environment, self.loop, sink, self.mask)
        assert self.reaper
        self.reaper.watch(starter.pid)
        return starter

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
        hello = self.identify(agent, kind, body)
        self.refusal = self.refusal or hello.get("refused", "")
        self.connected += 1
        if hello["rank"] == 0:
            self.master_port = hello["master_port"]
        if self.connected == self.world_size and not self.refusal:
            self._start_ranks()

    def identify(self, agent: AgentConnection, kind: bytes, body: bytes) -> dict[str, Any]:
        """Note whose agent it is, which its first message says.

        Raises:
            ValueError: The connection is not from an agent of this job.
        """
        hello: dict[str, Any] = agent_messages.read_json(body)
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
        return hello

    def _start_ranks(self) -> None:
        from sdp_plugins.core.internode import mpi_library  # takes long to import

        for starter in self.starters:
            starter.output.hidden = False
        self.stop_listening()
        places = [(rank.host, rank.address) for rank in self.ranks]
        nodes = list(dict.fromkeys(places))
        shared = {
            "MASTER_ADDR": addresses.master_address([address for _, address in places]),
            "MASTER_PORT": str(self.master_port),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "SDP_JOB_ID": self.plan.job.job_id,
        }
        if (
            self.plan.mpirun is None or not mpi_library.installed()
        ):  # with these variables, ranks would not use MPI
            shared |= torchelastic(self.plan.job.job_id)
        for rank, place in zip(self.ranks, places, strict=True):
            node = str(nodes.index(place))
            rank.variables = shared | {"NODE_RANK": node, "GROUP_RANK": node}
            self.start_rank(rank, {})

    def start_rank(self, rank: RemoteRank, extra: Mapping[str, str]) -> None:
        """Start a rank's program on its host, with variables that only this process has."""
        job, variables = self.plan.job, {**rank.variables, **extra}
        rank.start({"command": list(job.command), "variables": variables, "elastic": job.elastic})

    def stop_listening(self) -> None:
        """Refuse connections."""
        if self.listener:
            self.loop.drop_alarm(self.listener.fileno())
            self.listener.close()
            self.listener = None

    def note_losses(self) -> None:
        """Give an exit code to ranks whose agents are lost, or were not started."""
        codes = {starter: starter.exit_code() for starter in self.starters}
        ended = [starter for starter, code in codes.items() if code is not None]
        not_started = not all(map(self._have_connected, ended))
        for number in range(self.world_size) if not_started else self._lost():
            if self.ranks[number].code is None:
                self.ranks[number].code = next(filter(None, codes.values()), 1)

    def _lost(self) -> list[int]:
        return [number for starter in self.starters for number in self._lost_of(starter)]

    def _lost_of(self, starter: Starter) -> list[int]:
        """The ranks whose agents were lost, once the starter has ended or had time to report."""
        lost = [number for number in starter.ranks if self.ranks[number].lost_at is not None]
        first = min((self.ranks[number].lost_at or 0.0 for number in lost), default=0.0)
        may_wait = starter.exit_code() is None and time.monotonic() < first + LOST_S
        return [] if may_wait else lost

    def launch_failure(self) -> Ending | None:
        """Why the job cannot continue: a refusal, the end of mpirun, or the limit for starting."""
        if not self.starters:  # the job has ended: only output is left
            return None
        if self.refusal:
            return Ending(self.refusal)
        if self.connected == self.world_size:
            return self.why_lost()
        for starter in self.starters:
            if (code := starter.exit_code()) is not None and not self._have_connected(starter):
                return Ending(self._why_not_started(starter, code))
            if complaint := starter.complaint():  # after which MPICH's mpirun does not end
                return Ending(complaint)
        if time.monotonic() < self.start_by:
            return None
        here = ", ".join(dict.fromkeys(rank.host for rank in self.ranks if rank.host))
        return Ending(
            f"{self.world_size - self.connected} of {self.world_size} ranks did not start in "
            f"{START_S:.0f} s ({f'those on {here} did' if here else 'none did'}). Hint: "
            "firewalls must allow TCP between the hosts."
        )

    def _have_connected(self, starter: Starter) -> bool:
        return all(self.ranks[number].host for number in starter.ranks)

    def why_lost(self) -> Ending | None:
        """Why agents were lost, or mpirun has ended; None if neither is so."""
        (mpirun,) = self.starters
        code, lost = mpirun.exit_code(), self._lost()
        if not lost and code is not None:
            how = how_it_ended(code)
            return Ending(
                f"mpirun has ended before the ranks: {how}. Hint: check whether it was killed.", 1
            )
        if not lost:
            return None
        said = [mpirun.read(), *(rank.output.stderr.text() for rank in self.ranks)]
        if aborted := next((found for text in said if (found := ABORTED.search(text))), None):
            number = aborted.group(1) or aborted.group(2)
            return Ending(
                f"rank {number} called MPI_Abort, and mpirun ended the others.", code or 1
            )
        which = ", ".join(f"{number} (on {self.ranks[number].host})" for number in lost)
        return Ending(
            f"rank {which} ended without an exit code. Hint: it called MPI_Abort, its agent was "
            "killed, or its host is down; see mpirun's output above.",
            code or 1,
        )

    def _why_not_started(self, starter: Starter, code: int) -> str:
        """Why agents could not be started, in one line if the error is known."""
        text = starter.read()
        if complaint := starter.complaint():
            return complaint
        pairs = zip(self.plan.places, self.plan.addresses, strict=True)
        others = [host for host, address in pairs if not addresses.is_here(address)]
        named = next((host for host in others if host in text), ", ".join(others) or "this host")
        if self.plan.mpirun is None:
            named = starter.name
        if known := explained(text, named):
            return known
        starter.output.reveal()
        who = self.plan.mpirun or f"the command for {starter.name}"
        return f"{who} could not start the ranks: exit code {code}; see above."

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
        if not self.starters:
            return
        self.stop_listening()  # an agent that connects now would start its rank
        for starter in self.starters:
            starter.output.hidden = True  # or its messages about the ends would come last
        for connection in self.connections:
            connection.dismiss()
        if self.connected == self.world_size and self._end(END_S):
            return
        for starter in self.starters:
            starter.terminate()
        if not self._end(TERMINATE_S):
            kill_sessions({starter.pid for starter in self.starters})

    def _end(self, timeout_s: float) -> bool:
        """Whether the starters end in time; their output is shown meanwhile."""
        end = time.monotonic() + timeout_s
        while (left := any(s.exit_code() is None for s in self.starters)) and (
            time.monotonic() < end
        ):
            self.loop.run_once(end)
        return not left

    def reap(self) -> None:
        """Reap the starters and close the connections."""
        for starter in self.starters:
            starter.close()
        self.starters.clear()
        for connection in self.connections:
            connection.connection.close()
        if self.reaper:
            self.reaper.dismiss()
            self.stop_listening()


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
