"""send and recv: rounds of messages between random pairs, posted and awaited in random orders."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stress.soak.data import bits
from stress.soak.turn import Mismatch, Started, Turn

TAGS = 16  # of one operation


@dataclass(frozen=True)
class Message:
    """One message of a round."""

    number: int
    src: int
    dst: int
    tag: int
    dtype: str
    count: int


class All:
    """Several works as one, which waits in a random order."""

    def __init__(self, works: list[Any], own: random.Random) -> None:
        self.works = own.sample(works, len(works))

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


def messages(turn: Turn) -> list[Message]:
    """Draw pairs, tags (some repeated, which must keep their order), dtypes and sizes."""
    found = []
    for number in range(turn.plan.randrange(1, 9)):
        src, dst = turn.plan.sample(turn.everyone, 2)
        dtype = turn.dtype()
        tag = TAGS * (turn.index % 2**24) + turn.plan.randrange(TAGS - 1)
        count = turn.count(bits(dtype).itemsize, 2)
        found.append(Message(number, src, dst, tag, dtype, count))
    return found


def in_random_order(mine: list[Message], own: random.Random) -> list[Message]:
    """Shuffle, but keep the order of messages with the same pair and tag."""
    shuffled = own.sample(mine, len(mine))
    slots: dict[tuple[int, int, int], list[Message]] = {}
    for message in mine:
        slots.setdefault((message.src, message.dst, message.tag), []).append(message)
    return [slots[m.src, m.dst, m.tag].pop(0) for m in shuffled]


def data_of(turn: Turn, message: Message) -> Any:
    return turn.values(message.dtype, message.count, message.src, message.number)


def round_of_messages(turn: Turn) -> Started:
    """Use isend and irecv, each rank in an order of its own, or one batch_isend_irecv."""
    if turn.world == 1:
        return Started(None, lambda: None)
    whole, batched = messages(turn), turn.plan.random() < 0.4
    mine = in_random_order([m for m in whole if turn.rank in (m.src, m.dst)], turn.own)
    received: list[tuple[Message, Tensor]] = []
    calls: list[tuple[Callable[..., Any], Tensor, int, int]] = []
    for m in mine:
        if m.src == turn.rank:
            tensor = turn.tensor(m.dtype, data_of(turn, m), turn.own.choice(("dense", "strided")))
            calls.append((dist.isend, tensor, m.dst, m.tag))
        else:
            tensor = turn.blank(m.dtype, m.count, turn.own.choice(("dense", "strided")))
            received.append((m, tensor))
            calls.append((dist.irecv, tensor, m.src, m.tag))
    works = post_batch(turn, calls) if batched else [post(turn, *call) for call in calls]

    def check() -> None:
        for message, tensor in received:
            turn.equal(tensor, data_of(turn, message), f"message {message}")

    return Started(All(works, turn.own), check)


def post(turn: Turn, call: Any, tensor: Tensor, peer: int, tag: int) -> Any:
    where = "group_dst" if call is dist.isend else "group_src"
    return call(tensor, group=turn.group, tag=tag, **{where: peer})


def post_batch(turn: Turn, calls: list[Any]) -> list[Any]:
    batch = [
        dist.P2POp(call, tensor, group=turn.group, tag=tag, group_peer=peer)
        for call, tensor, peer, tag in calls
    ]
    return dist.batch_isend_irecv(batch) if batch else []


def from_any_source(turn: Turn) -> Started:
    """Receive on one rank from all others, in order of arrival."""
    if turn.world == 1:
        return Started(None, lambda: None)
    to, dtype = turn.plan.randrange(turn.world), turn.dtype()
    count, tag = turn.count(bits(dtype).itemsize, 2), TAGS * (turn.index % 2**24) + TAGS - 1
    if turn.rank != to:
        tensor = turn.tensor(dtype, turn.values(dtype, count, turn.rank))
        works = [dist.isend(tensor, group=turn.group, tag=tag, group_dst=to)]
        return Started(All(works, turn.own), lambda: None)
    outputs = [turn.blank(dtype, count) for _ in range(turn.world - 1)]
    works = [dist.irecv(output, None, turn.group, tag) for output in outputs]

    def check() -> None:
        sources = [work._source_rank() for work in works if work is not None]
        if sorted(sources) != [r for r in turn.everyone if r != to]:
            raise Mismatch(f"received from {sources}")
        for output, source in zip(outputs, sources, strict=True):
            turn.equal(output, turn.values(dtype, count, source), f"message of rank {source}")

    return Started(All(works, turn.own), check)


def blocking_ring(turn: Turn) -> Started:
    """Send to the right and receive from the left, even ranks in one order and odd in the other."""
    if turn.world < 2:
        return Started(None, lambda: None)
    dtype, tag = turn.dtype(), TAGS * (turn.index % 2**24)
    count = turn.count(bits(dtype).itemsize, 2)
    right, left = (turn.rank + 1) % turn.world, (turn.rank - 1) % turn.world
    mine, output = turn.values(dtype, count, turn.rank), turn.blank(dtype, count)
    order = [True, False] if turn.rank % 2 else [False, True]
    for receives in order:
        if receives:
            dist.recv(output, group=turn.group, tag=tag, group_src=left)
        else:
            dist.send(turn.tensor(dtype, mine), group=turn.group, tag=tag, group_dst=right)
    return Started(None, lambda: turn.equal(output, turn.values(dtype, count, left)))
