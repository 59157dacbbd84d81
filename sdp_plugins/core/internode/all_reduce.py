"""all_reduce and reduce across nodes."""

from __future__ import annotations

from .agreement import await_leader
from .algorithm_choice import plan_of
from .operation import SpanningOperation
from .plan import Algorithm
from .recursive_multiplying import reduce_by_recursive_multiplying
from .sharded_reduction import ShardedReduction


def all_reduce(operation: SpanningOperation) -> None:
    """Run all_reduce, or reduce: an all_reduce whose result only the root keeps."""
    plan = plan_of(operation)
    if operation.request.count == 0:
        return
    if plan.algorithm is Algorithm.sharded:
        await_leader(operation)
        ShardedReduction(operation, plan).run()
    else:
        reduce_by_recursive_multiplying(operation, plan)
