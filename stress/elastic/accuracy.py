"""Training with losses in its first epoch reaches the accuracy of the same without."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from stress.elastic.check import problems
from stress.elastic.job import Job, StuckError
from stress.elastic.rank import Setting

EPOCHS, BATCH = 5, 4
LEAST = 0.9
TOLERANCE = 0.02  # twice the standard error of an accuracy of 0.95 on 297 digits is 0.025


class Outcome(NamedTuple):
    """A training that has come to its end.

    Attributes:
        job: Its parent.
        problems: What does not hold.
        accuracy: The share of the held-out digits that the ranks know.
    """

    job: Job
    problems: list[str]
    accuracy: float = 0.0


def outcome(ranks: int, faults: int, seed: int, timeout_s: float) -> Outcome:
    """Train; kill as many ranks, one by one, in the first epoch, and let others join."""
    with tempfile.TemporaryDirectory() as folder:
        slow = Path(folder) / "slow"
        slow.touch()
        setting = Setting(timeout_s, EPOCHS, BATCH, str(slow))
        job = Job(ranks, setting, random.Random(seed))
        try:
            for number in range(ranks):
                job.start(number, join=False)
            job.await_step(set(range(ranks)), 0.0)
            for _ in range(faults):
                job.fault("kill")
            found = [] if job.committed[-1].epoch == 0 else ["the first epoch was too short"]
            slow.unlink()
            job.finish()
        except StuckError as error:
            return Outcome(job, [str(error)])
        finally:
            job.close()
    found += problems(job.committed, is_whole=True)
    if len(set(job.ended.values())) != 1:
        found.append(f"the ranks' accuracies differ: {job.ended}")
    if [fault.kind for fault in job.faults] != ["kill", "join"] * faults:
        found.append(f"the training ended before all kills: {job.faults}")
    return Outcome(job, found, max(job.ended.values()))


def compare(disturbed: Outcome, calm: Outcome) -> list[str]:
    """What does not hold of a training with kills, and the same without."""
    found = [*disturbed.problems, *calm.problems]
    apart = abs(disturbed.accuracy - calm.accuracy)
    if min(disturbed.accuracy, calm.accuracy) < LEAST or apart > TOLERANCE:
        found.append(
            f"accuracies: {disturbed.accuracy:.3f} with kills, {calm.accuracy:.3f} without"
        )
    return found
