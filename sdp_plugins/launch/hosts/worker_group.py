"""The ranks of a job on a list of hosts: mpirun starts their agents, which connect here."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence

from sdp_plugins.core.local_address import LOOPBACK
from sdp_plugins.launch.hosts import addresses, messages
from sdp_plugins.launch.hosts.diagnosis import explained
from sdp_plugins.launch.hosts.mpirun_output import MpirunOutput
from sdp_plugins.launch.hosts.plan import Plan
from sdp_plugins.launch.hosts.remote_ranks import Link, RemoteRank
from sdp_plugins.launch.output import Stream
from sdp_plugins.launch.report import how_it_ended
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process
from sdp_plugins.launch.worker_group import Ending, OutputSinks, StartContext

START_S = 120.0  # limit for all agents to connect
LOST_S = 5.0  # from the loss of an agent to that of its rank: mpirun may report more
MOST_STRANGERS = 64  # connections without a token yet
END_S = 5.0  # limit for mpirun to end after its agents
TERMINATE_S = 3.0  # from SIGTERM to SIGKILL
ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)|\(rank (\d+) in comm 0\): .*MPI_Abort")


class RanksOnHosts:
    """The workers of a job on hosts.

    Args:
        plan: The job, checked.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks: list[RemoteRank] = []
        self.errors: dict[int, Stream] = {}
        self.links: list[Link] = []
        self.met = 0
        self.refused = ""
        self.hurried = False  # the job ends: do not wait for the reader of the output
        self.mpirun: RankProcess | None = None
        self.reaper: Reaper | None = None

    def start(self, output: OutputSinks, context: StartContext) -> bool:
        """Start mpirun; the ranks follow."""
        self.reaper, self.output = Reaper(TERMINATE_S), output
        self.ports = listener(self.plan.addresses)
        output.loop.add_alarm(self.ports.fileno(), self.accept)
        self._expect_ranks()
        self.start_by = time.monotonic() + START_S
        command = self.plan.command(self.ports.getsockname()[1])
        # On SIGTERM mpirun removes its files and ends its daemons.
        setup = child_setup(context.mask, signal.SIGTERM)
        self.mpirun = start_process(command, self.plan.environment, setup, stdin=False)
        self.reaper.watch(self.mpirun.pid)
        self.mpirun_output = MpirunOutput(output.loop, output.stderr, self.mpirun)
        return True

    def _expect_ranks(self) -> None:
        for number in range(sum(self.plan.places.values())):
            errors = self.output.stream(number, self.output.stderr)
            self.ranks.append(RemoteRank(self.output.stream(number, self.output.stdout), errors))
            self.errors[number] = errors

    def accept(self) -> None:
        """Accept a connection; its first message identifies it."""
        for link in [link for link in self.links if link.ended]:
            self._drop(link)
        strangers = [link for link in self.links if link.rank is None]
        if len(strangers) >= MOST_STRANGERS:  # some may be agents, so drop only the oldest
            self._drop(strangers[0])
        try:
            connection, _ = self.ports.accept()
        except OSError:  # it has closed, or no descriptor is left
            if strangers:
                self._drop(strangers[0])
            return
        connection.setblocking(False)
        messages.keep_alive(connection)
        link = Link(connection, self.meet, self.held_back)
        self.links.append(link)
        self.output.loop.add_source(link)

    def _drop(self, link: Link) -> None:
        self.output.loop.drop_source(link)
        link.connection.close()
        self.links.remove(link)

    def held_back(self, rank: RemoteRank) -> bool:
        """Whether a rank must wait for the reader of the launcher's output."""
        if self.hurried or rank.kill_by is not None:
            return False
        return any(stream.held_back() for stream in rank.streams.values())

    def meet(self, link: Link, kind: bytes, body: bytes) -> None:
        """Handle an agent's first message or its refusal; when all have connected, start the ranks.

        Raises:
            ValueError: The connection is not from an agent of this job.
        """
        if kind == messages.REFUSED and link.rank:
            self.refused = self.refused or body.decode(errors="replace")
            return
        hello = messages.read_json(body)
        if kind != messages.HELLO or not secrets.compare_digest(hello["token"], self.plan.token):
            raise ValueError("not an agent of this job")
        rank = self.ranks[hello["rank"]]
        link.rank, rank.link = rank, link
        link.inbox.longest = messages.LONGEST
        rank.host, rank.address = hello["host"], addresses.peer(link.connection)
        for stream in rank.streams.values():
            stream.source = link
        self.refused = self.refused or hello.get("refused", "")
        self.met += 1
        if hello["rank"] == 0:
            self.master_port = hello["master_port"]
        if self.met == len(self.ranks) and not self.refused:
            self._let_start()

    def _let_start(self) -> None:
        self.mpirun_output.live = True
        self._hang_up()
        places = [(rank.host, rank.address) for rank in self.ranks]
        nodes = list(dict.fromkeys(places))
        first = addresses.first_ones([address for _, address in places])
        job = {"master_addr": first, "master_port": self.master_port, "nodes": len(nodes)}
        job["command"] = list(self.plan.job.command)
        for rank, place in zip(self.ranks, places, strict=True):
            if rank.link:
                rank.link.say(messages.START, {**job, "node": nodes.index(place)})

    def _hang_up(self) -> None:
        """Stop accepting connections."""
        if self.ports.fileno() >= 0:
            self.output.loop.drop_alarm(self.ports.fileno())
            self.ports.close()

    def note_losses(self) -> None:
        """Give an exit code to ranks whose agents are lost, or that mpirun did not start."""
        if self.mpirun is None:
            return
        code = self.mpirun.exit_code()
        not_started = code is not None and self.met < len(self.ranks)
        for rank in self.ranks if not_started else self._lost(code).values():
            rank.lost_code = code or 1

    def _lost(self, code: int | None) -> dict[int, RemoteRank]:
        """The ranks whose agents were lost, once mpirun has ended or had time to report."""
        gone = {number: rank for number, rank in enumerate(self.ranks) if rank.gone is not None}
        times = [rank.gone for rank in gone.values() if rank.gone is not None]
        may_wait = code is None and time.monotonic() < min(times, default=0) + LOST_S
        return {} if may_wait else gone

    def launch_failure(self) -> Ending | None:
        """Why the job cannot continue: a refusal, the end of mpirun, or the limit for starting."""
        if self.mpirun is None:  # the job has ended: only output is left
            return None
        if self.refused:
            return Ending(self.refused)
        code = self.mpirun.exit_code()
        if self.met == len(self.ranks):
            return self._why_lost(code)
        if code is not None:
            return Ending(self._why_not_started(code))
        if complaint := self._agents_complaint():  # after which MPICH's mpirun does not end
            return Ending(complaint)
        if time.monotonic() < self.start_by:
            return None
        here = ", ".join(dict.fromkeys(rank.host for rank in self.ranks if rank.host))
        return Ending(
            f"{len(self.ranks) - self.met} of {len(self.ranks)} ranks did not start in "
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
        self.mpirun_output.read()
        said = [
            self.mpirun_output.text(),
            *(b"".join(e.tail).decode("utf-8", "replace") for e in self.errors.values()),
        ]
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

    def _why_not_started(self, code: int) -> str:
        """Why mpirun could not start the ranks, in one line if the error is known."""
        self.mpirun_output.read()
        if complaint := self._agents_complaint():
            return complaint
        text = self.mpirun_output.text()
        pairs = zip(self.plan.places, self.plan.addresses, strict=True)
        others = [host for host, address in pairs if not addresses.is_here(address)]
        named = next((host for host in others if host in text), ", ".join(others) or "this host")
        if known := explained(text, named):
            return known
        self.mpirun_output.show()
        return f"{self.plan.mpirun} could not start the ranks: exit code {code}; see above."

    def _agents_complaint(self) -> str:
        """The error of an agent that did not reach the launcher; empty if there is none."""
        lines = self.mpirun_output.text().splitlines(keepends=True)
        ours = [line for line in lines if "sdp run: " in line and line.endswith("\n")]
        return ours[-1].partition("sdp run: ")[2].strip() if ours else ""

    def due(self) -> float | None:
        """When the limit for starting ends, or a lost rank is given up."""
        times = [rank.kill_by for rank in self.ranks if rank.kill_by is not None]
        times += [rank.gone + LOST_S for rank in self.ranks if rank.gone is not None]
        if self.met < len(self.ranks):
            times.append(self.start_by)
        now = time.monotonic()
        return min((when for when in times if when > now), default=None)

    def kill(self) -> None:
        """Dismiss the agents, which end their ranks; mpirun should then end."""
        if self.mpirun is None:
            return
        self.hurried, self.mpirun_output.live = True, False
        for link in self.links:
            link.let_go()
        if self.met == len(self.ranks) and self._ends(END_S):
            return
        self.mpirun.send(signal.SIGTERM)
        if not self._ends(TERMINATE_S):
            kill_sessions({self.mpirun.pid})

    def _ends(self, timeout_s: float) -> bool:
        """Whether mpirun ends in time; its output is shown meanwhile."""
        assert self.mpirun
        end = time.monotonic() + timeout_s
        while self.mpirun.exit_code() is None and time.monotonic() < end:
            self.output.loop.run_once(end)
        return self.mpirun.exit_code() is not None

    def reap(self) -> None:
        """Reap mpirun and close the connections."""
        if self.mpirun:
            kill_sessions({self.mpirun.pid})
            self.mpirun.close()
            self.mpirun = None
        for link in self.links:
            link.connection.close()
        if self.reaper:
            self.reaper.dismiss()
            self._hang_up()


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
