"""SMDDP's import names, for its scripts; what they mean is in ``sdp_plugins``.

``smdistributed`` itself is a namespace: other packages add to it. SageMaker's toolkit imports this
one in a process of its own, so nothing is loaded before it is used.
"""

from itertools import count as _count

_tasks = _count()


def start_profiler(path: str, append_rank: bool = False) -> None:
    """Record a timeline; see ``sdp_plugins.trace.smddp_profiler``."""
    from sdp_plugins.trace import smddp_profiler

    smddp_profiler.start_profiler(path, append_rank)


def stop_profiler() -> None:
    """Write it."""
    from sdp_plugins.trace import smddp_profiler

    smddp_profiler.stop_profiler()


def _get_id_for_herring_task() -> int:
    """The number of an operation that a script is about to issue: from 0, another in each call."""
    return next(_tasks)
