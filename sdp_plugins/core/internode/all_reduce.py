"""all_reduce and reduce across nodes."""

from __future__ import annotations

from .. import _native
from .call import Call
from .exchange import Pipeline, Reduction
from .headers import DIRECT
from .plan import Kind
from .planning import plan_of
from .swap import Swap


def all_reduce(call: Call, keep: frozenset[int] | None = None) -> None:
    """Run all_reduce.

    Args:
        call: The operation.
        keep: Ranks that need the result; None: all. Others' buffers stay as they are.
    """
    plan = plan_of(call, direct=keep is not None)
    call.begin(gate=plan.kind is Kind.exchange)
    if call.request.count == 0:
        return
    if plan.kind is Kind.exchange:
        Pipeline(Reduction(call, plan, keep)).run()
    else:
        Swap(call, plan, keep).run()


def reduce(call: Call) -> None:
    """Run reduce: all_reduce whose result only the root keeps."""
    all_reduce(call, frozenset({call.request.root}))


def can_follow(call: Call) -> bool:
    """Whether an operation's first segments can be sent while the one before ends."""
    if call.request.op is not _native.Op.all_reduce or call.request.count == 0:
        return False
    if call.here.nodes.count > DIRECT:  # they compare in rounds, for which somebody has to wait
        return False
    return plan_of(call).kind is Kind.exchange
