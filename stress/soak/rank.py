"""One rank of a soak."""

from __future__ import annotations

import gc
import os
import random
import time
import warnings
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core import Group
from stress.soak.growth import Sample, sample
from stress.soak.plan import Step, step
from stress.soak.spoiling import WAYS
from stress.soak.turn import Live, Mismatch, Started, Turn
from tests.ranks import say

CHECKPOINT = 200
"""After this many steps all operations complete, sub-groups end, and a sample is taken."""
TIMEOUT = timedelta(seconds=60)  # allows for busy machines


@dataclass(frozen=True)
class Settings:
    """The settings of a soak.

    Attributes:
        seed: The seed of the plan.
        seconds: The minimum duration.
        steps: The maximum number of steps; None: no limit.
        store_port: The port of torch's store, which the starting process serves.
        spoil: The name of an intentional error; empty for none.
        checkpoint: Steps between two samples.
    """

    seed: int
    seconds: float
    steps: int | None
    store_port: int
    spoil: str = ""
    checkpoint: int = CHECKPOINT


class Soak:
    """The state of one rank."""

    def __init__(self, rank: int, world: int, settings: Settings) -> None:
        self.rank, self.world, self.settings = rank, world, settings
        self.own = random.Random(f"{settings.seed} rank {rank}")
        self.pending: list[Started] = []
        self.samples: list[Sample] = []
        self.done: dict[str, int] = {}
        self.index = 0
        everyone = tuple(range(world))
        self.title = "the beginning"
        self.groups = [Live(dist.group.WORLD, everyone, rank)]
        self.groups[0].kept["core"] = Group.from_env(timeout_s=TIMEOUT.total_seconds())

    def touch_all(self) -> None:
        """Touch all memory that the groups share; it would otherwise become resident gradually."""
        peers = [peer for peer in range(self.world) if peer != self.rank]
        core, many = self.groups[0].kept["core"], torch.zeros(2**21)
        dist.all_reduce(many)
        core.all_reduce(many.numpy())
        small = torch.zeros(2**17)
        works = [dist.isend(small, peer) for peer in peers]
        works += [dist.irecv(torch.zeros(2**17), peer) for peer in peers]
        works.append(dist.all_reduce(torch.zeros(1), async_op=True).get_future().then(
            lambda _: dist.all_reduce(torch.zeros(2**21))
        ))  # fmt: skip
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()

    def run(self) -> dict[str, Any]:
        """Run until the time is over or all steps are done."""
        self.touch_all()
        since = time.monotonic()
        while True:
            if self.index and self.index % self.settings.checkpoint == 0:
                self.be_quiet()
                if self.all_stop(time.monotonic() - since):
                    break
            if self.index == self.settings.steps:
                self.be_quiet()
                break
            self.take(step(self.settings.seed, self.index, self.world, len(self.groups)))
            self.index += 1
        self.groups[0].kept.pop("core").close()
        return {"steps": self.index, "samples": self.samples, "done": self.done}

    def take(self, planned: Step) -> None:
        """Run one step."""
        name = planned.kind if planned.kind != "run" else planned.operation.__name__
        self.done[name] = self.done.get(name, 0) + 1
        self.title = f"step {self.index}, {name}, group {planned.group}"
        if planned.kind == "make":
            self.make(planned.members, planned.random)
        elif planned.kind == "destroy":
            self.destroy(planned.group)
        elif planned.kind == "timeout":
            self.set_timeout(planned)
        else:
            self.start(planned)
        WAYS[self.settings.spoil]()
        while len(self.pending) > planned.in_flight:
            self.finish(self.own.randrange(len(self.pending)))

    def make(self, members: tuple[int, ...], draw: random.Random) -> None:
        limit = timedelta(seconds=draw.randrange(60, 90))
        group = dist.new_group(list(members), timeout=limit)
        place = members.index(self.rank) if self.rank in members else -1
        self.groups.append(Live(group, members, place))

    def destroy(self, at: int) -> None:
        live = self.groups.pop(at)
        for started in [one for one in self.pending if one.group is live]:
            self.finish(self.pending.index(started))
        if live.rank >= 0:
            # Otherwise it might be closed before the others have their data, as in any backend.
            dist.barrier(live.handle)
            dist.destroy_process_group(live.handle)

    def set_timeout(self, planned: Step) -> None:
        live = self.groups[planned.group]
        if live.rank >= 0:
            limit = timedelta(seconds=planned.random.randrange(60, 90))
            dist.distributed_c10d._set_pg_timeout(limit, live.handle)

    def start(self, planned: Step) -> None:
        live = self.groups[planned.group]
        if live.rank < 0:
            return
        turn = Turn(
            self.settings.seed, self.index, live, planned.random, self.own, planned.asynchronous
        )
        started = planned.operation(turn)
        started.group, started.title = live, self.title
        if started.work is None:
            self.check(started)
        elif not planned.dropped:
            self.pending.append(started)

    def finish(self, at: int) -> None:
        started = self.pending.pop(at)
        started.work.wait()
        self.check(started)

    def check(self, started: Started) -> None:
        self.title = started.title
        started.check()

    def be_quiet(self) -> None:
        """Wait for all operations, end sub-groups, and take a sample."""
        while self.pending:
            self.finish(self.own.randrange(len(self.pending)))
        while len(self.groups) > 1:
            self.destroy(len(self.groups) - 1)
        self.groups[0].kept = {"core": self.groups[0].kept["core"]}
        gc.collect()
        for _ in range(2):  # withdraws freed registrations, also at peers
            dist.all_reduce(torch.zeros(2**18))
            self.groups[0].kept["core"].barrier()
        made = self.done.get("make", 0) + self.done.get("mishap", 0)
        self.samples.append(sample(made))
        if self.rank == 0:
            say((self.index, self.samples[-1]))

    def all_stop(self, seconds: float) -> bool:
        """Return whether rank 0's time is over; check that all ranks are at the same step."""
        known: list[Any] = [None] * self.world
        digest = zlib.crc32(repr(sorted(self.done.items())).encode())
        dist.all_gather_object(known, (self.index, digest, seconds))
        if len({(index, mark) for index, mark, _ in known}) != 1:
            raise Mismatch(f"ranks are at different steps: {known}")
        return bool(known[0][2] >= self.settings.seconds)


def soak(rank: int, world: int, settings: Settings) -> dict[str, Any]:
    """Run a rank from start to end; `tests.ranks` calls it."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some calls
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    os.environ.pop("SDP_TRACE", None)
    store = dist.TCPStore("127.0.0.1", settings.store_port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    run = Soak(rank, world, settings)
    try:
        result = run.run()
    except Exception as error:
        dist.group.WORLD.abort(error)  # type: ignore[call-arg, union-attr]
        again = f"python -m stress.soak.run --ranks {world} --seed {settings.seed}"
        raise Mismatch(
            f"seed {settings.seed}, {run.title}, rank {rank}: {type(error).__name__}: {error}\n"
            f"Again: {again} --steps {run.index + 1}"
        ) from error
    dist.destroy_process_group()
    return result
