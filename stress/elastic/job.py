"""The parent of a job's ranks: starts them, and ends some at random moments."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from sdp_plugins.core.regroup import RosterFile
from stress.elastic.rank import Committed, Setting, main
from tests.ranks import free_port

LIMIT_S = 60.0
PAUSE_S = 0.3


class Fault(NamedTuple):
    """What was done to the job, and how long it took to go on.

    Attributes:
        kind: ``kill``, ``kill 2``, ``stop`` or ``join``.
        seconds: From the fault to the next step that all who are left have committed.
    """

    kind: str
    seconds: float


class StuckError(Exception):
    """Raised when the others do not go on."""


@dataclass
class Job:
    """One elastic training of some ranks."""

    world: int
    setting: Setting
    random: random.Random
    committed: list[Committed] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what ranks said that were left out
    ended: dict[int, float] = field(default_factory=dict)  # the accuracies
    last: dict[int, Committed] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["stress.elastic.warm"])
        self.rosters = RosterFile()
        self.handles: list[str] = []
        self.processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}
        self.environment = {
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "SDP_JOB_ID": f"elastic-{os.getpid()}-{time.monotonic_ns()}",
            "SDP_ROSTERS": self.rosters.path,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, number: int, join: bool) -> None:
        """Start a rank."""
        ours, theirs = self.context.Pipe(duplex=False)
        place = {"RANK": str(number), "LOCAL_RANK": str(number)}
        environment = {**self.environment, **place}
        if join:
            environment["SDP_JOIN"] = ",".join(self.handles)
        arguments = (number, environment, self.setting, theirs)
        process = self.context.Process(target=main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.processes[number], self.pipes[number] = process, ours

    def listen(self, limit_s: float = 0.0) -> None:
        """Take what ranks have said."""
        for pipe in wait(list(self.pipes.values()), limit_s):
            assert isinstance(pipe, Connection)
            try:
                while pipe.poll():
                    self.take(pipe.recv())
            except (EOFError, OSError):
                for number in [n for n, p in self.pipes.items() if p is pipe]:
                    del self.pipes[number]
        for roster in self.rosters.new():
            self.handles = list(map(str, roster.handles))

    def take(self, said: Any) -> None:
        """Take one message of a rank."""
        if isinstance(said, Committed):
            self.committed.append(said)
            self.last[said.number] = said
        elif said[0] == "asks":
            self.asked[said[1]] = said[2]
        elif said[0] == "ended":
            self.ended[said[1]] = said[2]
        else:
            self.left.append(f"rank {said[1]}: {said[2]}")

    def await_step(self, numbers: set[int], since: float) -> float:
        """Wait until these ranks, and no others, have committed a step together.

        Returns:
            Seconds from `since` until the last of them has.
        """
        end = time.monotonic() + LIMIT_S
        wanted = tuple(sorted(numbers))
        while time.monotonic() < end:
            self.listen(0.5)
            if self.ended:
                return -1.0
            steps = [self.last.get(number) for number in numbers]
            if all(one and one.numbers == wanted and one.at > since for one in steps):
                first = [
                    min(
                        one.at
                        for one in self.committed
                        if one.number == number and one.at > since and one.numbers == wanted
                    )
                    for number in numbers
                ]
                return max(first) - since
        raise StuckError(f"ranks {wanted} do not go on; the last steps: {self.last}")

    def fault(self, kind: str) -> bool:
        """Do something to the job, and wait until it goes on.

        Returns:
            False if the training has ended.
        """
        time.sleep(self.random.random() * PAUSE_S)
        self.listen()
        victims = self.random.sample(sorted(self.processes), 2 if kind == "kill 2" else 1)
        since = time.monotonic()
        for victim in victims:
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            os.kill(self.processes[victim].pid or 0, number)
            if kind == "kill 2":
                time.sleep(self.random.random() * 0.05)
        left = set(self.processes) - set(victims)
        seconds = self.await_step(left, since)
        for victim in victims:
            self.bury(victim)
        if seconds < 0:
            return False
        self.faults.append(Fault(kind, seconds))
        for victim in victims:
            self.asked.pop(victim, None)
            self.start(victim, join=True)
        self.await_step(set(self.processes), since)
        if self.ended:
            return False
        for victim in victims:
            joined = min(
                one.at for one in self.committed if one.number == victim and one.at > since
            )
            self.faults.append(Fault("join", joined - self.asked[victim]))
        return True

    def bury(self, number: int) -> None:
        """End a rank that is lost."""
        process = self.processes.pop(number)
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if (pipe := self.pipes.pop(number, None)) is not None:
            pipe.close()
        self.last.pop(number, None)

    def finish(self) -> None:
        """Wait until the training has ended."""
        end = time.monotonic() + LIMIT_S
        while len(self.ended) < len(self.processes):
            self.listen(0.5)
            if time.monotonic() > end:
                raise StuckError(f"only ranks {sorted(self.ended)} have ended")

    def close(self) -> None:
        """End all ranks that are left."""
        for number in list(self.processes):
            self.bury(number)
        self.rosters.close()
