"""How many ranks a machine has if nobody says; without a framework."""

from __future__ import annotations

import os
from glob import glob

MOST_RANKS = 8
"""As many as the largest instance of SageMaker has GPUs."""


def count_gpus() -> int:
    """The number of GPUs of this machine."""
    return len(glob("/dev/nvidia[0-9]*"))


def default_rank_count() -> int:
    """One rank for each GPU; without any, one for each core, `MOST_RANKS` at most."""
    return count_gpus() or min(MOST_RANKS, len(os.sched_getaffinity(0)))
