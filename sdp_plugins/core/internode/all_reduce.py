"""all_reduce and reduce across nodes."""

from __future__ import annotations

from .. import _native
from .agreement import await_leader
from .headers import RADIX
from .operation import Operation
from .pipeline import Pipeline
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
        Pipeline(ShardedReduction(operation, plan, keep)).run()
    else:
        RecursiveMultiplying(operation, plan, keep).run()


def reduce(operation: Operation) -> None:
    """Run reduce: an all_reduce whose result only the root keeps."""
    all_reduce(operation, frozenset({operation.request.root}))


def can_follow(operation: Operation) -> bool:
    """Whether an operation's first segments can be sent before the previous operation ends."""
    if operation.request.op is not _native.Op.all_reduce or operation.request.count == 0:
        return False
    if operation.context.nodes.count > RADIX:  # each round of headers needs a wait
        return False
    return plan_of(operation).algorithm is Algorithm.sharded
