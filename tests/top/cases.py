"""What ranks do in the tests of `sdp top`, and how they are seen."""

from __future__ import annotations

import time

import numpy as np

from sdp_plugins.core import Group
from sdp_plugins.flight.choice import job_here
from sdp_plugins.top.figures import GroupFigures
from sdp_plugins.top.job_watch import JobWatch
from sdp_plugins.top.sampling import Sampling
from tests.ranks import HANG_S, Ranks, say

BYTES = 400
PAUSE_S = 0.04


def train(rank: int, world: int, slow: int) -> None:
    """Steps of three operations; one rank takes longer, and none if it is -1."""
    with Group.from_env(name="seen", timeout_s=HANG_S) as group:
        data, other = np.ones(BYTES // 4, np.float32), np.ones(BYTES // 8)
        end = time.monotonic() + HANG_S
        group.barrier()
        say("going")
        while time.monotonic() < end:
            group.all_reduce(data)
            group.all_reduce(data)
            group.broadcast(other, 0)
            if rank == slow:
                time.sleep(PAUSE_S)


def watch_of(ranks: Ranks) -> JobWatch:
    """Reads the ranks' job."""
    return JobWatch(job_here(ranks.environment["SDP_JOB_ID"]))


def sampling_of(ranks: Ranks, interval_s: float = 1.0) -> Sampling:
    """Readings of the ranks' job."""
    return Sampling(watch_of(ranks), interval_s)


def going(ranks: Ranks) -> None:
    """Wait until every rank has begun."""
    for rank in ranks:
        assert rank.heard() == "going"


def seen_group(found: list[GroupFigures]) -> GroupFigures:
    """The group of `train`; a pool's ranks may have others."""
    (group,) = (g for g in found if g.ranks[0].state.snapshot.info.name == "seen")
    return group
