"""Random programs of sends and receives, many of them from any rank: the same plan on all ranks.

Of each tag, a receiver's receives from named ranks are posted before those from any rank, so that
it is known who gets what: of a sender's messages the first go to the former, in order, and the
others, in order, to the latter.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdp_plugins.core import Group

TAGS = 3
"""Of one round."""
COUNTS = (0, 1, 50, 50, 5000, 5000, 300_001)


@dataclass(frozen=True)
class Traffic:
    """What one rank receives with one tag.

    Attributes:
        tag: Of these messages.
        count: Their elements.
        sent: How many messages each rank sends.
        named: How many of them are received from that very rank.
    """

    tag: int
    count: int
    sent: dict[int, int]
    named: dict[int, int]


def content(source: int, tag: int, number: int, count: int) -> Any:
    """Of a message: no two are alike."""
    return np.arange(count, dtype=np.int64) + 1_000_003 * (source + 64 * (tag + 4096 * number)) + 1


def plan(random: random.Random, world: int, first_tag: int) -> dict[tuple[int, int], Traffic]:
    """A round: by receiver and tag."""
    traffic = {}
    for receiver in range(world):
        for tag in range(first_tag, first_tag + TAGS):
            sent = {rank: random.randrange(4) for rank in range(world) if rank != receiver}
            named = {rank: random.choice((0, 0, random.randint(0, n))) for rank, n in sent.items()}
            traffic[receiver, tag] = Traffic(tag, random.choice(COUNTS), sent, named)
    return traffic


def post_sends(group: Group, traffic: dict[tuple[int, int], Traffic], own: random.Random) -> Any:
    """All of this rank's, in an order of its own."""
    slots = [key for key, what in traffic.items() for _ in range(what.sent.get(group.rank, 0))]
    next_of: dict[tuple[int, int], int] = defaultdict(int)
    works = []
    for receiver, tag in own.sample(slots, len(slots)):
        number = next_of[receiver, tag]
        next_of[receiver, tag] += 1
        data = content(group.rank, tag, number, traffic[receiver, tag].count)
        works.append(group.send(data, receiver, tag, async_op=True))
    return works


def sources_of(what: Traffic, own: random.Random) -> list[int | None]:
    """From whom to receive, in order; None: from any."""
    named: list[int | None] = [rank for rank, n in what.named.items() for _ in range(n)]
    n_any = sum(what.sent.values()) - len(named)
    return own.sample(named, len(named)) + [None] * n_any


def run_round(group: Group, number: int, seed: int) -> None:
    """Post, wait and compare."""
    traffic = plan(random.Random(f"{seed} {number}"), group.world_size, number * TAGS)
    own = random.Random(f"{seed} {number} {group.rank}")
    total = np.ones(3000)
    summing = group.all_reduce(total, async_op=True)
    sends = post_sends(group, traffic, own)
    mine = {tag: what for (receiver, tag), what in traffic.items() if receiver == group.rank}
    queues = {tag: sources_of(what, own) for tag, what in mine.items()}
    posted: dict[int, list[tuple[int | None, Any, Any]]] = defaultdict(list)
    while left := [tag for tag, queue in queues.items() if queue]:
        tag = own.choice(left)
        buffer = np.full(mine[tag].count, -1, np.int64)
        source = queues[tag].pop(0)
        work = group.recv(buffer, source, tag, async_op=True)
        posted[tag].append((source, buffer, work))
        if own.random() < 0.2:
            own.choice(posted[tag])[2].wait()
    for tag, what in mine.items():
        check(what, posted[tag])
    for work in (*sends, summing):
        work.wait()
    assert (total == group.world_size).all()


def check(what: Traffic, posted: list[tuple[int | None, Any, Any]]) -> None:
    """Of each sender all messages have come, in order."""
    next_of = dict.fromkeys(what.sent, 0)
    for source, buffer, work in posted:
        work.wait()
        found = work.source_rank
        assert source in (None, found), (source, found)
        assert (buffer == content(found, what.tag, next_of[found], what.count)).all()
        next_of[found] += 1
    assert next_of == what.sent
