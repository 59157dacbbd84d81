"""all_reduce and reduce across nodes."""

from __future__ import annotations

from .agreement import await_leader
from .operation import Operation
from .plan import Algorithm
from .planning import plan_of
from .recursive_multiplying import RecursiveMultiplying
from .sharded_reduction import ShardedReduction


def all_reduce(operation: Operation, keep: frozenset[int] | None = None) -> None:
    """Run all_reduce.

    Args:
        operation: The operation.
        keep: Ranks that need the result; None: all. Buffers of other ranks do not change.
    """
    plan = plan_of(operation, direct=keep is not None)
    if operation.request.count == 0:
        return
    if plan.algorithm is Algorithm.sharded:
        await_leader(operation)
        ShardedReduction(operation, plan, keep).run()
    else:
        RecursiveMultiplying(operation, plan, keep).run()


def reduce(operation: Operation) -> None:
    """Run reduce: an all_reduce whose result only the root keeps."""
    all_reduce(operation, frozenset({operation.request.root}))
