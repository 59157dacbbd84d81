"""The plan of a chaos run: which job meets which fault, from the seed and the job's number."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORKS = ("collectives", "asynchronous", "groups", "messages", "ddp", "callbacks", "mixture")
LIVES = (*WORKS, "creation", "start", "end")  # and the moments at which a group is made or left

# What the starting process does to a rank, and what a rank does itself.
SIGNALS = ("kill", "stop", "stop and continue", "pause")
DISAGREEMENTS = ("other dtype", "other count", "other operation", "other reduction", "other root",
                 "one more", "one less")  # fmt: skip
OWN = ("late", "slow", "raise", "abort", "destroy", "exit 1", "exit 0", "os._exit")
FAULTS = (*SIGNALS, *OWN, *DISAGREEMENTS)
HARMLESS = ("pause", "slow")
"""After these the job goes on, with the right results."""
HALTING = ("stop", "stop and continue", "late")
"""After these the others reach the time-out."""
SIDE_BY_SIDE = ("groups", "asynchronous", "creation", "messages", "callbacks", "mixture")
"""Lives in which a rank may wait for one thing while another waits for it in something else."""
WEIGHTS = {"kill": 10, "stop": 6, "stop and continue": 4, "pause": 4, "late": 4, "slow": 4}


@dataclass(frozen=True)
class Job:
    """One job of a chaos run.

    Attributes:
        seed: Of the run.
        number: In the run.
        world: Ranks.
        life: What they do; one of LIVES.
        fault: What befalls the victims; one of FAULTS.
        victims: Who.
        timeout_s: Of the groups.
        moment_s: After how long a signal is sent, or a rank does its own.
        pause_s: How long it is stopped or slow.
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
    """A job of a run."""
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
