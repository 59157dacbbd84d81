"""The ranks of an elastic job on a list of hosts, of which ranks and whole hosts may be lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.core.regroup.roster import Roster
from sdp_plugins.launch.elastic_workers import ElasticWorkers, Loss
from sdp_plugins.launch.hosts import agent_messages
from sdp_plugins.launch.hosts.host_job import HostPlan
from sdp_plugins.launch.hosts.remote_rank import AgentConnection, RemoteRank
from sdp_plugins.launch.hosts.remote_ranks import LOST_S, RemoteRanks
from sdp_plugins.launch.hosts.starter import Starter
from sdp_plugins.launch.worker_group import Ending

LOST_CODE = 1  # of a rank that nobody can tell of
FIRST_TRY_S = 1.0  # from the loss of a host until its agents are started again
NEXT_TRY_S = 30.0  # until they are once more, unless all have connected


class ElasticHosts(ElasticWorkers, RemoteRanks):
    """A worker group on hosts that outlives some of them.

    The agent of the rank that leads a group sends its roster. It is passed on to the others, for
    processes that join on their hosts. The agents of a lost host are started again once it answers.
    """

    def __init__(self, plan: HostPlan) -> None:
        super().__init__(plan)
        self._rosters: list[Roster] = []
        self._try_at: dict[Starter, float] = {}  # when to start the agents of a lost host again

    def receive(self, agent: AgentConnection, kind: bytes, body: bytes) -> None:
        """Also take rosters, and agents that have been started again."""
        if agent.rank is None and self._runs:
            self.identify(agent, kind, body)
        elif kind == agent_messages.ROSTER and agent.rank:
            self._take_roster(agent, body)
        else:
            super().receive(agent, kind, body)

    def _take_roster(self, agent: AgentConnection, body: bytes) -> None:
        roster = Roster.from_json(agent_messages.read_json(body))
        self._rosters.append(roster)
        for other in self.connections:
            if other is not agent and other.rank:  # others may be strangers
                other.send(agent_messages.ROSTER, roster.to_json())

    def new_rosters(self) -> list[Roster]:
        """The rosters that agents have sent since the last call."""
        rosters, self._rosters = self._rosters, []
        return rosters

    def start_again(self, number: int, extra: Mapping[str, str]) -> RemoteRank:
        """Make the rank's agent start a process that joins."""
        self.start_rank(self.ranks[number], extra)
        return self.ranks[number]

    @property
    def _runs(self) -> bool:
        return self.connected == self.world_size

    def note_losses(self) -> None:
        """Give an exit code to ranks that were not started; for those lost later: `new_losses`."""
        if not self._runs:
            super().note_losses()

    def launch_failure(self) -> Ending | None:
        """Why the job cannot begin."""
        return None if self._runs else super().launch_failure()

    def new_losses(self) -> list[Loss]:
        """The ranks whose agents were lost, or do not answer, since the last call."""
        if not self._runs:
            return []
        found = ((starter, self._newly_lost(starter)) for starter in self.starters)
        return [self._loss(starter, lost) for starter, lost in found if lost]

    def _newly_lost(self, starter: Starter) -> list[int]:
        """The lost ranks of a host; if others run there, those have had time to be lost, too."""
        ranks = {number: self.ranks[number] for number in starter.ranks}
        running = {number: rank for number, rank in ranks.items() if rank.code is None}
        silent = [number for number, rank in running.items() if rank.is_silent]
        times = {n: rank.lost_at for n, rank in running.items() if rank.lost_at is not None}
        others = running.keys() - times.keys() - {*silent}
        if others and time.monotonic() < min(times.values(), default=0.0) + LOST_S:
            return silent
        return sorted({*silent, *times})

    def _loss(self, starter: Starter, lost: Sequence[int]) -> Loss:
        for number in lost:
            self.ranks[number].code = LOST_CODE
        self._dismiss(lost)
        who = name_ranks(lost)
        text, self.refusal = self.refusal, ""
        is_whole = all(self.ranks[number].code is not None for number in starter.ranks)
        if is_whole:
            self._try_at[starter] = time.monotonic() + FIRST_TRY_S
            self._forget_agents(starter)
            text = text or f"host {starter.name} is lost, and {who} with it"
        text = text or f"the agent of {who} on {starter.name} has ended, and the rank with it"
        return Loss(lost, text, f"see whether {starter.name} is up, and why", is_whole)

    def _dismiss(self, ranks: Iterable[int]) -> None:
        """Let agents end their ranks, should they get the message."""
        for number in ranks:
            if agent := self.ranks[number].agent:
                agent.dismiss()

    def _forget_agents(self, starter: Starter) -> None:
        """Let others connect for a host's ranks; the end of these then means nothing."""
        self._dismiss(starter.ranks)
        for number in starter.ranks:
            self.ranks[number] = self.ranks[number].anew(LOST_CODE)

    def new_returns(self) -> list[int]:
        """Start agents on lost hosts; return the ranks of hosts on which all have connected."""
        found: list[int] = []
        for starter, when in list(self._try_at.items()):
            if all(self.ranks[number].agent for number in starter.ranks):
                starter.output.hidden = False
                found += starter.ranks
                del self._try_at[starter]
                if not self._try_at:
                    self.stop_listening()
            elif when <= time.monotonic():
                self._try_at[starter] = time.monotonic() + NEXT_TRY_S
                with suppress(OSError, subprocess.SubprocessError):  # no process is free, say
                    self._replace(starter)
        return found

    def _replace(self, starter: Starter) -> None:
        """Start the agents of a host again, and end what has been started before."""
        place = self.starters.index(starter)
        again = self.start_agents(self.plan.starts(self.listen())[place])
        again.output.hidden = True
        self.starters[place] = again
        self._try_at[again] = self._try_at.pop(starter)
        self._forget_agents(starter)
        starter.close()
        assert self.reaper
        self.reaper.forget(starter.pid)

    def kill(self) -> None:
        """Also end what has not reached its host yet."""
        for starter in self._try_at:
            starter.terminate()
        super().kill()
