"""The guarantees of docs/errors.md to the ranks of a job, and the check of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stress.chaos.jobs import DISAGREEMENTS, HALTING, HARMLESS, SIDE_BY_SIDE, Job
from stress.chaos.rank import End

NOTICE_S = 0.1
"""Waiting ranks notice the end of a process within this time."""
MARGIN_S = 1.0
"""Tolerance for busy machines: two cores for up to six ranks and other programs."""
LONGEST_S = 60.0
"""Limit beyond the guaranteed time from fault to error, for ranks that wait for the victim late."""
STORE = re.compile("the store failed|store did not answer")
EXIT_S = 60.0
"""Limit within which a process ends after its script."""


@dataclass
class Fate:
    """The outcome of one rank.

    Attributes:
        end: The end that its script reported; None if it reported nothing.
        exitcode: The exit code of the process; None if it had to be killed.
        exited_at: When the process ended.
    """

    end: End | None = None
    exitcode: int | None = None
    exited_at: float = 0.0


ENDED_BY_THE_LAUNCHER = Fate()


@dataclass
class Verdict:
    """The verdict on one job.

    Attributes:
        problems: Broken guarantees; empty for a clean end.
        over_s: The longest time that a survivor waited for the victim beyond the guaranteed time.
        total_s: The same since the fault, including the time before the survivor began to wait.
        second_hand: Number of survivors that name a rank which had failed because of the victim.
        torchs: Number of ranks that ended with an error of c10d's own.
    """

    problems: list[str] = field(default_factory=list)
    over_s: float = 0.0
    total_s: float = 0.0
    second_hand: int = 0
    torchs: int = 0


def judge(job: Job, fates: list[Fate], fault_at: float, resumed_at: float = 0.0) -> Verdict:
    """Compare the ranks' outcomes with the guarantees."""
    verdict = Verdict()
    if not fault_at and job.fault not in HARMLESS:
        verdict.problems.append("it failed before the fault")
    for rank in range(job.world):
        if fates[rank] is ENDED_BY_THE_LAUNCHER:
            continue
        if rank in job.victims and not victim_has_to_end(job):
            continue
        for problem in problems_of(job, rank, fates, fault_at, resumed_at, verdict):
            verdict.problems.append(f"rank {rank}: {problem}")
    return verdict


def victim_has_to_end(job: Job) -> bool:
    kinds = (*HARMLESS, *DISAGREEMENTS, "late", "stop and continue")
    return job.fault in kinds


def problems_of(
    job: Job, rank: int, fates: list[Fate], fault_at: float, resumed_at: float, verdict: Verdict
) -> list[str]:
    fate = fates[rank]
    if fate.end is None:
        return [f"told nothing, exit code {fate.exitcode}"]
    found = []
    if fate.exitcode is None:
        found.append("its process did not end")
    elif fate.exitcode != (1 if fate.end.error else 0):
        found.append(f"exit code {fate.exitcode} after {fate.end.error or 'a good end'}")
    stopped_s = max(0.0, resumed_at - fault_at) if rank in job.victims else 0.0
    if (leaving_s := fate.exited_at - fate.end.at - stopped_s) > EXIT_S:
        found.append(f"its process ended {leaving_s:.1f} s after its script")
    if not is_promised(job, rank, fates, verdict):
        found.append(f"ended with {fate.end}")
    if fate.end.error and job.fault not in HARMLESS:
        since = max(fault_at, resumed_at) if rank in job.victims else fault_at
        took_s, promise_s = fate.end.at - since, promised_s(job, rank, fate.end)
        over_s = min(took_s, fate.end.waited_s) - promise_s
        verdict.over_s = max(verdict.over_s, over_s)
        verdict.total_s = max(verdict.total_s, took_s - promise_s)
        if over_s > MARGIN_S or took_s - promise_s > LONGEST_S:
            found.append(f"{over_s:.2f} s late, {took_s:.2f} s after the fault: {fate.end}")
    return found


def promised_s(job: Job, rank: int, end: End) -> float:
    """Return the guaranteed seconds from the fault to the error."""
    # Ranks that have not met do not notice each other's end.
    before_meeting = end.error == "RendezvousTimeoutError" or end.is_torchs
    notice_s = job.timeout_s if before_meeting else NOTICE_S
    if rank in job.victims and job.fault in ("late", "stop and continue"):
        return notice_s + (job.pause_s if job.fault == "late" else 0)
    if job.fault in DISAGREEMENTS:
        return 0.0
    return job.timeout_s if job.fault in HALTING else notice_s


def is_promised(job: Job, rank: int, fates: list[Fate], verdict: Verdict) -> bool:
    """Return whether a rank ended as guaranteed."""
    end = fates[rank].end
    assert end is not None
    if job.fault in HARMLESS:
        return not end.error
    if not end.error:
        return job.life == "end"
    if rank in job.victims and job.fault not in DISAGREEMENTS:
        if end.is_torchs or STORE.search(end.text):  # rank 0 has ended, and the store with it
            return job.life in ("creation", "start") and job.own_store
        return end.error in ("CollectiveTimeoutError", "PeerLostError", "RendezvousTimeoutError")
    if end.is_torchs or STORE.search(end.text):
        verdict.torchs += 1
        return job.life in ("creation", "start") and store_is_hit(job)
    return end.error in promised_errors(job) and names_the_right(job, rank, fates, verdict)


def store_is_hit(job: Job) -> bool:
    """Return whether a victim serves torch's store, or torch waits for the victim."""
    return job.life == "start" or (job.own_store and 0 in job.victims)


def promised_errors(job: Job) -> tuple[str, ...]:
    if job.fault in DISAGREEMENTS:
        return ("CollectiveMismatchError",)
    by_store = ("RendezvousTimeoutError",) if job.life in ("creation", "start") else ()
    if job.fault in HALTING:  # or a rank lost a peer that had timed out
        return ("CollectiveTimeoutError", "PeerLostError", *by_store)
    return ("PeerLostError", *by_store)


def names_the_right(job: Job, rank: int, fates: list[Fate], verdict: Verdict) -> bool:
    """Return whether the error names a victim, or a rank that failed earlier because of one."""
    end = fates[rank].end
    assert end is not None
    blamed = set(end.blamed)
    if job.fault in DISAGREEMENTS:
        return blamed == set(job.victims) or job.world == 2  # with two ranks, either may be wrong
    if not blamed:
        return False
    halted = job.fault in HALTING and job.life in SIDE_BY_SIDE
    slack_s = MARGIN_S if halted else NOTICE_S  # it may wait for the victim elsewhere
    failed_before = {
        r
        for r, other in enumerate(fates)
        if r != rank and other.end and other.end.error and other.end.at <= end.at + slack_s
    }
    if halted and blamed & set(job.victims):
        return True  # or ranks that wait for a victim elsewhere: they are absent, too
    if not blamed & set(job.victims):
        verdict.second_hand += 1
        return blamed <= failed_before
    return blamed <= failed_before | set(job.victims)
