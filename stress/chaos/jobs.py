"""The plan of a chaos run: each job's fault, from the seed and the job's number."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORKS = ("collectives", "asynchronous", "groups", "messages", "ddp", "sharded", "callbacks",
         "mixture")  # fmt: skip
LIVES = (*WORKS, "creation", "start", "end")  # plus the creation and the end of a group

# Faults that the starting process injects, and faults that a rank causes itself.
SIGNALS = ("kill", "stop", "stop and continue", "pause")
DISAGREEMENTS = ("other dtype", "other count", "other operation", "other reduction", "other root",
                 "one more", "one less")  # fmt: skip
OWN = ("late", "slow", "raise", "abort", "destroy", "exit 1", "exit 0", "os._exit")
FAULTS = (*SIGNALS, *OWN, *DISAGREEMENTS)
HARMLESS = ("pause", "slow")
"""Faults after which the job continues with correct results."""
HALTING = ("stop", "stop and continue", "late")
"""Faults after which the other ranks reach their timeout."""
SIDE_BY_SIDE = ("groups", "asynchronous", "creation", "messages", "callbacks", "mixture")
"""Work in which ranks may wait for each other in different operations."""
WEIGHTS = {"kill": 10, "stop": 6, "stop and continue": 4, "pause": 4, "late": 4, "slow": 4}


@dataclass(frozen=True)
class Job:
    """One fault-injection job of a chaos run.

    Attributes:
        seed: The seed of the run.
        number: The job's number in the run.
        world: Number of ranks.
        life: The work of the ranks; one of LIVES.
        fault: The fault of the victims; one of FAULTS.
        victims: The ranks with the fault.
        timeout_s: Timeout of the groups.
        moment_s: Delay before a signal, or before a rank's own fault.
        pause_s: How long a victim is stopped or slow.
        ends_tidily: Whether ranks destroy their group when they fail, as in `finally`.
        own_store: Whether rank 0 serves torch's store, as without torchrun.
        launched: Whether `sdp run` starts the ranks.
    """

    seed: int
    number: int
    world: int
    life: str
    fault: str
    victims: tuple[int, ...]
    timeout_s: float
    moment_s: float
    pause_s: float
    ends_tidily: bool
    own_store: bool
    launched: bool

    def __str__(self) -> str:
        who = " and ".join(map(str, self.victims))
        how = " under sdp run" if self.launched else ""
        return (
            f"job {self.number}: {self.world} ranks, {self.life}: {self.fault} of {who} "
            f"after {self.moment_s:.2f} s{how}"
        )


def planned(seed: int, number: int, launched: bool | None = None) -> Job:
    """Return a job of a run."""
    draw = random.Random(f"{seed} {number}")
    fault = draw.choices(FAULTS, [WEIGHTS.get(name, 2) for name in FAULTS])[0]
    world = draw.randrange(2, 7)
    timeout_s = round(draw.uniform(2.5, 3.5), 1)
    lives = WORKS if fault in (*OWN, *DISAGREEMENTS) else LIVES
    life = draw.choice(lives)
    if fault in DISAGREEMENTS:
        life = draw.choice(("collectives", "asynchronous", "groups", "callbacks"))
    several = world > 2 and fault in ("kill", "stop", "exit 1") and draw.random() < 0.3
    short = fault in HARMLESS
    pause_s = draw.uniform(0.05, 0.5) * timeout_s if short else draw.uniform(1.2, 1.6) * timeout_s
    moment_s = draw.uniform(0.0, 0.6)
    if life == "start":
        moment_s = draw.uniform(0.0, 0.1)
    under = draw.random() < 0.1 if launched is None else launched
    return Job(
        seed,
        number,
        world,
        life,
        fault,
        tuple(sorted(draw.sample(range(world), 2 if several else 1))),
        timeout_s,
        moment_s,
        pause_s,
        draw.random() < 0.5,
        draw.random() < 0.3,
        under and fault not in ("stop and continue", "pause") and life not in ("start", "end"),
    )
