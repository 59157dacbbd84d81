"""The default number of ranks on a machine, found without a framework."""

from __future__ import annotations

import math
import os
from glob import glob

from sdp_plugins.core.control_groups import cpu_quota

MOST_RANKS = 8
"""The number of GPUs of SageMaker's largest instance."""


def count_gpus() -> int:
    """The number of GPUs of this machine."""
    return len(glob("/dev/nvidia[0-9]*"))


def usable_cores() -> int:
    """The cores that this process may use at the same time, for which containers have limits."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_quota())))


def default_rank_count() -> int:
    """One rank per GPU, or without GPUs one per core, at most `MOST_RANKS`."""
    return count_gpus() or min(MOST_RANKS, usable_cores())
