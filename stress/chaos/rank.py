"""One rank of a job: rounds of work until it or another rank fails."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core import SdpError
from stress.chaos.faults import FAULTS
from stress.chaos.jobs import DISAGREEMENTS, HARMLESS, OWN, Job
from stress.chaos.works import ROUNDS, Place, prepare
from tests.ranks import say

Tell = Callable[[Any], None]
LONGEST_S = 60.0
HARMLESS_S = 0.3


@dataclass(frozen=True)
class End:
    """The end of a rank's script.

    Attributes:
        error: The name of the exception's type; empty if there was none.
        is_torchs: Whether it is an exception of c10d's own.
        blamed: The ranks that it names, as ranks of the job.
        text: The exception's text.
        at: The time of the end, on the machine's clock.
        waited_s: How long the rank had waited for the missing one.
        rounds: Number of complete rounds.
    """

    error: str
    is_torchs: bool
    blamed: tuple[int, ...]
    text: str
    at: float
    waited_s: float
    rounds: int


def run_rank(rank: int, world: int, job: Job, store_port: int, tell: Tell = say) -> None:
    """Run the whole script; end the process as an uncaught exception does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = Place(job, rank, tuple(range(world)))
    try:
        go(place, store_port, tell)
        tell(("end", End("", False, (), "", time.monotonic(), 0.0, place.rounds)))
    except SystemExit:
        raise
    except BaseException as error:
        tell(("end", described(error, place)))
        traceback.print_exc()
        if job.ends_tidily and dist.is_initialized():
            dist.destroy_process_group()
        sys.last_value = error  # as Python sets it for exit handlers
        sys.exit(1)


def described(error: BaseException, place: Place) -> End:
    ranks = error.ranks if isinstance(error, SdpError) else ()
    blamed = tuple(place.members[r] for r in ranks if r < len(place.members))
    return End(
        error=type(error).__name__,
        is_torchs=isinstance(error, dist.DistError),
        blamed=blamed,
        text=str(error)[:2000],
        at=time.monotonic(),
        waited_s=error.elapsed_s if isinstance(error, SdpError) else float("inf"),
        rounds=place.rounds,
    )


def go(place: Place, store_port: int, tell: Tell) -> None:
    job, limit = place.job, timedelta(seconds=place.job.timeout_s)
    tell(("here", time.monotonic()))
    options: dict[str, Any] = {"timeout": limit}
    if not job.own_store and store_port:
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=limit)
        options.update(store=store, rank=place.rank, world_size=place.world)
    dist.init_process_group("smddp", **options)
    prepare(place)
    tell(("going", time.monotonic()))
    if job.launched and place.rank in job.victims and job.fault not in FAULTS:
        befall_myself(job, tell)
    work(place, tell)
    tell(("leaving", time.monotonic()))
    if job.life == "end":
        time.sleep(place.own().random() * 0.05)
    dist.destroy_process_group()


def work(place: Place, tell: Tell) -> None:
    """Run rounds until all ranks agree to stop."""
    job, since = place.job, time.monotonic()
    fault_at = random.Random(f"{job.seed} {job.number} own").randrange(2, 12)
    for number in itertools.count():
        if number == fault_at and job.fault in FAULTS:
            meet_fault(place, tell)
        ROUNDS[job.life](place, place.draw(number))
        place.rounds = number + 1
        place.members = place.everyone
        enough = torch.tensor([float(is_enough(job, number, time.monotonic() - since))])
        dist.all_reduce(enough, dist.ReduceOp.MAX)
        if enough.item():
            return


def is_enough(job: Job, number: int, seconds: float) -> bool:
    if job.life == "end" and number > 3:
        return True
    if job.fault in HARMLESS:
        return number > 12 and seconds > job.moment_s + job.pause_s + HARMLESS_S
    return seconds > LONGEST_S


def meet_fault(place: Place, tell: Tell) -> None:
    """Inject a victim's fault; if the fault is a mismatch, the other ranks make the usual call."""
    job = place.job
    place.members = place.everyone
    if place.rank in job.victims:
        tell(("fault", time.monotonic()))
        FAULTS[job.fault](place)
    elif job.fault in DISAGREEMENTS:
        from stress.chaos.faults import usual

        usual(place)
    if job.fault in DISAGREEMENTS:
        dist.barrier()
    assert job.fault in (*OWN, *DISAGREEMENTS)


def befall_myself(job: Job, tell: Tell) -> None:
    """Send the signal to this process: under a launcher no other process sends it."""
    import signal

    number = signal.SIGKILL if job.fault == "kill" else signal.SIGSTOP

    def strike() -> None:
        tell(("fault", time.monotonic()))
        os.kill(os.getpid(), number)

    timer = threading.Timer(job.moment_s, strike)
    timer.daemon = True
    timer.start()
