"""Ranks for tests: fresh processes with a launcher's variables, each with a deadline.

    results = run_ranks(4, my_function, arg)            # my_function(rank, world, arg), 4 times

    with start_ranks(4, my_function) as ranks:          # failure injection
        assert ranks[2].heard() == "in the middle"      # the rank called say("in the middle")
        ranks[2].kill(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            ranks[0].result()

    def test_many(rank_pool):                           # hundreds of cases: processes are kept
        rank_pool(4).run(my_function, arg)

    def test_loss(start_pooled):                        # failure injection in kept processes,
        with start_pooled(4, my_function) as ranks:     # of which those that were lost are replaced
            ...

A function must be importable (module level in a test file): its ranks are forked with that module
in them, so that none has to import torch. A text in its place is the source of a module with
`main(rank, world, *args)`, and has an interpreter of its own, as have ranks with `env`. What a
function prints is shown when something fails.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import Fork, ForkServers, forks_of
from tests.rank import HANG_S, Outcome, Rank, RankFailure, report

Function = Callable[..., Any] | str
OTHER_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC_", "HYDRA_")
FAILURE_GRACE_S = 30.0
parent_connection: Connection | None = None  # in a rank: the way to the test
kept: dict[str, Any] = {}  # in a pool's rank: lives from case to case, close()d at the end


def say(value: Any) -> None:
    """In a rank: tell the test something, usually that a point was reached."""
    assert parent_connection is not None, "say() is for ranks"
    parent_connection.send_bytes(pickle.dumps(("said", value, "", time.monotonic())))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job_environment(world: int) -> dict[str, str]:
    """The variables that are equal on all ranks of a new job."""
    job = uuid.uuid4().hex
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SDP_JOB_ID": job,
        "TORCHELASTIC_RUN_ID": job,
    }


def rank_environment(extra: Mapping[str, str | None] | None, **of_rank: str) -> dict[str, str]:
    """A rank's whole environment; a variable that is None in `extra` is left out."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(OTHER_LAUNCHERS)}
    env.setdefault("OMP_NUM_THREADS", "1")  # ranks share two cores
    env.update(of_rank, PYTHONUNBUFFERED="1")
    for name, value in (extra or {}).items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


@dataclass
class Ranks:
    """The ranks of one job; use as a context manager, whose end kills what is left."""

    ranks: list[Rank]
    environment: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every rank that is still there."""
        for rank in self.ranks:
            rank.destroy()

    def give(self, function: Function, args: tuple[Any, ...], job: Mapping[str, str]) -> None:
        """Start one case on every rank."""
        payload = pickle.dumps((function, args))
        for rank in self.ranks:
            rank.give(payload, job)

    def results(self, timeout_s: float = HANG_S) -> list[Any]:
        """Every rank's result in rank order, or RankFailure with all outputs."""
        outcomes = self.outcomes(timeout_s)
        if any(outcome.kind != "returned" for outcome in outcomes):
            if any(outcome.kind == "running" for outcome in outcomes):
                self.dump_stacks()
            raise RankFailure(report(self.ranks, "not every rank returned"), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, timeout_s: float = HANG_S) -> list[Outcome]:
        """Wait for all; once one has failed the others get only a short grace."""
        end = time.monotonic() + timeout_s
        while waiting := [rank for rank in self.ranks if rank._outcome is None]:
            sources = [s for rank in waiting for s in (rank.connection, rank.pidfd)]
            if not wait(sources, max(0.0, end - time.monotonic())):
                break
            for rank in waiting:
                if rank.wait(0):
                    rank.receive()
            if any(rank.failed for rank in waiting):
                end = min(end, time.monotonic() + FAILURE_GRACE_S)
        return [rank.outcome(0) for rank in self.ranks]

    def dump_stacks(self) -> None:
        """Have the ranks that still run write their Python stacks to their outputs."""
        for rank in self.ranks:
            if rank._outcome is None:
                rank.kill(signal.SIGUSR2)
                rank.kill(signal.SIGCONT)
        time.sleep(0.3)

    def finish(self) -> None:
        """Let all ranks end; fails when one hangs or crashes at its exit."""
        end = time.monotonic() + HANG_S
        for rank in self.ranks:
            rank.connection.close()
        codes = [rank.finish(max(0.1, end - time.monotonic())) for rank in self.ranks]
        left = [rank.rank for rank in self.ranks if rank.left_processes()]
        if left or any(code != 0 for code in codes):
            title = f"ranks did not end cleanly: exit codes {codes}, processes left by ranks {left}"
            text = report(self.ranks, title)
            raise RankFailure(text, [rank.outcome(0) for rank in self.ranks])


def forks_for(function: Function, env: Mapping[str, str | None] | None) -> Fork | None:
    """What forks ranks with a function's module in them; None for interpreters of their own.

    Ranks have these where an import may read their environment, and for a source, which is to be a
    whole program.
    """
    return None if env or isinstance(function, str) else forks_of(function.__module__)


def start_rank(
    rank: int, job: Mapping[str, str], env: Mapping[str, str | None] | None, fork: Fork | None
) -> Rank:
    """Start an idle rank of a job."""
    own = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return Rank(rank, rank_environment(env, **own), fork)


def spawn(n: int, env: Mapping[str, str | None] | None = None, fork: Fork | None = None) -> Ranks:
    """Start n idle ranks of a new job."""
    job = job_environment(n)
    ranks = Ranks([], job)
    try:
        for rank in range(n):
            ranks.ranks.append(start_rank(rank, job, env, fork))
    except BaseException:
        ranks.close()
        raise
    return ranks


def start_ranks(
    n: int, function: Function, *args: Any, env: Mapping[str, str | None] | None = None
) -> Ranks:
    """Start `function(rank, world, *args)` on n fresh ranks and return their handles."""
    ranks = spawn(n, env, forks_for(function, env))
    ranks.give(function, args, {})
    return ranks


def run_ranks(
    n: int,
    function: Function,
    *args: Any,
    timeout_s: float = HANG_S,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Run `function(rank, world, *args)` on n fresh ranks; their results in rank order.

    Raises:
        RankFailure: A rank raised, died, was still running after `timeout_s` (its stack is in the
            text), or crashed at its exit. The text holds the output of all ranks.
    """
    with start_ranks(n, function, *args, env=env) as ranks:
        results = ranks.results(timeout_s)
        ranks.finish()
        return results


class RankPool:
    """n ranks that run many cases one after the other; replaced by fresh ones after a failure.

    Every case gets a new SDP_JOB_ID and MASTER_PORT. A case of `run` may keep objects in
    `ranks.kept`; not where ranks that were lost in a case of `start` are replaced. Ranks with an
    environment have interpreters of their own, or are forked from two that have the same one and
    have imported `module`.
    """

    def __init__(
        self, n: int, env: Mapping[str, str | None] | None = None, module: str | None = None
    ) -> None:
        self.n = n
        self.env = env
        self.ranks: Ranks | None = None
        self._module = module
        self._servers: ForkServers | None = None

    def pids(self) -> set[int]:
        """The ranks' process ids."""
        return {rank.pid for rank in self.ranks or ()}

    def fds(self) -> set[int]:
        """The descriptors that the pool holds in the test process."""
        ranks = self.ranks or ()
        return {fd for r in ranks for fd in (r.connection.fileno(), r._output.fileno(), r.pidfd)}

    @contextmanager
    def start(self, function: Function, *args: Any) -> Iterator[Ranks]:
        """Start `function(rank, world, *args)` on all ranks; at the end replace those not idle."""
        fork = self._fork(function)
        if self.ranks is None:
            self.ranks = spawn(self.n, self.env, fork)
        job = self.ranks.environment = job_environment(self.n)
        for rank in self.ranks:
            rank._output.truncate(0)
        try:
            self.ranks.give(function, args, job)
            yield self.ranks
        except BaseException:
            self.ranks.close()
            self.ranks = None
            raise
        for i, rank in enumerate(self.ranks):
            if not rank.idle:
                rank.destroy()
                self.ranks.ranks[i] = start_rank(i, job, self.env, fork)

    def _fork(self, function: Function) -> Fork | None:
        if self._module is None:
            return forks_for(function, self.env)
        if self._servers is None:
            self._servers = ForkServers(self._module, rank_environment(self.env))
        return partial(self._servers.fork, self._module)

    def close(self) -> None:
        """Let the ranks end; fails when one hangs or crashes at its exit."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None
        if self.ranks is not None:
            ranks, self.ranks = self.ranks, None
            with ranks:
                ranks.finish()

    def run(self, function: Function, *args: Any, timeout_s: float = HANG_S) -> list[Any]:
        """Run `function(rank, world, *args)` on all ranks; their results in rank order."""
        with self.start(function, *args) as ranks:
            return ranks.results(timeout_s)


Pool = Callable[[int], RankPool]  # the fixture rank_pool
Start = Callable[..., AbstractContextManager[Ranks]]  # the fixture start_pooled
