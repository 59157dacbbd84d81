"""SMDDP's import names for its scripts; ``sdp_plugins`` implements them.

``smdistributed`` itself is a namespace package: other distributions add to it. SageMaker's toolkit
imports this package in a separate process, so it loads modules only when they are used.
"""

from itertools import count as _count

_tasks = _count()


def start_profiler(path: str, append_rank: bool = False) -> None:
    """Record a timeline, as ``sdp_plugins.trace.smddp_profiler`` describes."""
    from sdp_plugins.trace import smddp_profiler

    smddp_profiler.start_profiler(path, append_rank)


def stop_profiler() -> None:
    """Write the timeline."""
    from sdp_plugins.trace import smddp_profiler

    smddp_profiler.stop_profiler()


def _get_id_for_herring_task() -> int:
    """Return a number for the operation that a script is about to issue: 0, 1 and so on."""
    return next(_tasks)
