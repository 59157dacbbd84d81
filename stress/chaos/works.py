"""The work of ranks until a fault affects one of them: random rounds with checked results.

Every round is drawn from the job's seed and the round's number, so all ranks do the same without
communication. `Place.members` maps an error's ranks, those of the group in use, to ranks of the
job.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.torch import ShardedOptimizer, share
from stress.chaos.jobs import Job
from stress.soak.plan import WEIGHTS, chosen
from stress.soak.turn import Live, Turn
from tests.torch import models
from tests.torch.jobs import total, values

COUNTS = (0, 1, 100, 9000, 50_000, 300_000)


@dataclass
class Place:
    """One rank in one job."""

    job: Job
    rank: int
    members: tuple[int, ...] = ()  # of the group in use, as ranks of the job
    groups: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0

    @property
    def world(self) -> int:
        return self.job.world

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    def draw(self, number: int) -> random.Random:
        return random.Random(f"{self.job.seed} {self.job.number} round {number}")

    def own(self) -> random.Random:
        return random.Random()


def assert_same(actual: Any, expected: Any) -> None:
    """Fail unless two tensors, or two lists of them, are equal."""
    if isinstance(actual, torch.Tensor):
        actual, expected = [actual], [expected]
    assert all(map(torch.equal, actual, expected)), "a wrong result"


def prepare(place: Place) -> None:
    """Prepare a job's work before its first round."""
    if place.job.life in ("groups", "asynchronous"):
        for lacking in {0, place.world - 1}:
            members = tuple(r for r in place.everyone if r != lacking) or (0,)
            place.groups.append((new_group(place, members), members))
    place.groups.append((dist.group.WORLD, place.everyone))
    if place.job.life == "ddp":
        place.kept["model"] = models.wrap(models.Plain, None, gradient_as_bucket_view=True)
    if place.job.life == "sharded":
        place.kept["model"] = model = torch.nn.Linear(300, 300, bias=False)
        place.kept["optimizer"] = ShardedOptimizer(model, torch.optim.SGD, lr=1.0)
    if place.job.life == "collectives":
        place.kept["bucket"] = torch.zeros(300_000)
        share(place.kept["bucket"])
    dist.barrier()


def new_group(place: Place, members: tuple[int, ...]) -> Any:
    """Create a group with the job's timeout: torch's own default is half an hour."""
    return dist.new_group(list(members), timeout=timedelta(seconds=place.job.timeout_s))


def collectives(place: Place, draw: random.Random) -> None:
    """Run blocking collectives on all paths."""
    place.members = place.everyone
    for _ in range(4):
        call, count = draw.choice(CALLS), draw.choice(COUNTS)
        call(place, count, draw.randrange(place.world))


def all_reduce(place: Place, count: int, root: int) -> None:
    tensor = values(place.rank, count)
    dist.all_reduce(tensor)
    assert_same(tensor, total(place.world, count))


def all_reduce_bucket(place: Place, count: int, root: int) -> None:
    bucket = place.kept.get("bucket")
    if bucket is not None:
        bucket.copy_(values(place.rank, bucket.numel()))
        dist.all_reduce(bucket)
        assert_same(bucket, total(place.world, bucket.numel()))


def broadcast(place: Place, count: int, root: int) -> None:
    tensor = values(place.rank, count)
    dist.broadcast(tensor, root)
    assert_same(tensor, values(root, count))


def all_gather(place: Place, count: int, root: int) -> None:
    outputs = [torch.empty(count) for _ in place.everyone]
    dist.all_gather(outputs, values(place.rank, count))
    assert_same(outputs, [values(r, count) for r in place.everyone])


def all_to_all(place: Place, count: int, root: int) -> None:
    count = count // place.world
    output = torch.empty(place.world * count)
    dist.all_to_all_single(output, values(place.rank, count).repeat(place.world))
    assert_same(output, torch.cat([values(r, count) for r in place.everyone]))


def objects(place: Place, count: int, root: int) -> None:
    found: list[Any] = [None] * place.world
    dist.all_gather_object(found, place.rank)
    assert found == list(place.everyone)


def barrier(place: Place, count: int, root: int) -> None:
    dist.barrier()


CALLS = (all_reduce, all_reduce, all_reduce_bucket, broadcast, all_gather, all_to_all, objects,
         barrier)  # fmt: skip


def asynchronous(place: Place, draw: random.Random) -> None:
    """Run many operations over several groups; each rank waits for them in an order of its own."""
    pending = []
    for _ in range(draw.randrange(2, 9)):
        group, members = draw.choice(place.groups)
        count = draw.choice(COUNTS)
        if place.rank in members:
            place.members = members
            tensor = values(members.index(place.rank), count)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            pending.append((work, members, tensor, total(len(members), count)))
    place.own().shuffle(pending)
    for work, members, tensor, expected in pending:
        place.members = members
        work.wait()
        assert_same(tensor, expected)


def groups(place: Place, draw: random.Random) -> None:
    """Use overlapping sub-groups, one after the other."""
    for _ in range(3):
        group, members = draw.choice(place.groups)
        count = draw.choice(COUNTS)
        if place.rank in members:
            place.members = members
            tensor = values(members.index(place.rank), count)
            dist.all_reduce(tensor, group=group)
            assert_same(tensor, total(len(members), count))


def messages(place: Place, draw: random.Random) -> None:
    """Send messages in a ring, then from all ranks to one rank that receives from any source."""
    place.members, count, root = place.everyone, draw.choice(COUNTS), draw.randrange(place.world)
    right, left = (place.rank + 1) % place.world, (place.rank - 1) % place.world
    output = torch.empty(count)
    works = [dist.irecv(output, left), dist.isend(values(place.rank, count), right)]
    place.own().shuffle(works)
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
    assert_same(output, values(left, count))
    if place.rank != root:
        dist.send(values(place.rank, 5), root, tag=1)
        return
    for _ in range(place.world - 1):
        small = torch.empty(5)
        source = dist.recv(small, tag=1)
        assert_same(small, values(source, 5))


def ddp(place: Place, draw: random.Random) -> None:
    place.members = place.everyone
    models.train(place.kept["model"], place.rank, steps=1)


def sharded(place: Place, draw: random.Random) -> None:
    """Train by shards: the weights change by the mean of the ranks' gradients."""
    place.members = place.everyone
    weight, optimizer = place.kept["model"].weight, place.kept["optimizer"]
    before, gradient = weight.detach().clone(), values(place.rank, weight.numel())
    dist.barrier()  # all have read the weights
    (weight * gradient.view_as(weight)).sum().backward()
    optimizer.step()
    mean = total(place.world, weight.numel()).view_as(weight) / place.world
    assert torch.allclose(weight, before - mean), "a wrong result"


def callbacks(place: Place, draw: random.Random) -> None:
    """Run callbacks that reduce once more, concurrently with the main thread."""
    place.members, count = place.everyone, draw.choice(COUNTS)
    tensor = torch.ones(count)

    def again(future: Any) -> Any:
        (result,) = future.value()
        dist.all_reduce(result)
        return result

    future = dist.all_reduce(tensor, async_op=True).get_future().then(again)
    dist.barrier()
    assert_same(future.wait(), torch.full((count,), float(place.world**2)))


def creation(place: Place, draw: random.Random) -> None:
    """Create, use and leave a group."""
    members = tuple(sorted(draw.sample(place.everyone, draw.randrange(1, place.world + 1))))
    place.members = members if place.rank in members else place.everyone
    group = new_group(place, members)
    if place.rank in members:
        tensor = values(members.index(place.rank), 1000)
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, total(len(members), 1000))
        dist.barrier(group)
        dist.destroy_process_group(group)


def mixture(place: Place, draw: random.Random) -> None:
    """Run operations of the soak, with all its dtypes, layouts and results."""
    place.members = place.everyone
    live = place.kept.setdefault("live", Live(dist.group.WORLD, place.everyone, place.rank))
    pending = []
    for index in range(4):
        operation = chosen(draw, WEIGHTS)
        plan = random.Random(draw.random())
        key = draw.randrange(2**20)
        turn = Turn(place.job.seed, key + index, live, plan, place.own(), draw.random() < 0.5)
        pending.append(operation(turn))
    for started in pending:
        if started.work is not None:
            started.work.wait()
        started.check()


ROUNDS: dict[str, Callable[[Place, random.Random], None]] = {
    "collectives": collectives,
    "asynchronous": asynchronous,
    "groups": groups,
    "messages": messages,
    "ddp": ddp,
    "sharded": sharded,
    "callbacks": callbacks,
    "creation": creation,
    "mixture": mixture,
    "start": collectives,
    "end": collectives,
}
