"""Whether all ranks call the same operation; compared before any of its data moves."""

from __future__ import annotations

import copy
import ctypes

from .. import _native
from .headers import Headers
from .operation import Operation


class Agreement:
    """The comparison of one operation.

    Args:
        operation: What this rank calls.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._headers: Headers | None = None

    def announce(self) -> bool:
        """On a node's leader: tell the other nodes what is called, if they have not been told.

        Returns:
            Whether all nodes are known to call the same, without waiting for them.
        """
        return self._announced().arrived()

    def reach(self) -> None:
        """Compare what all ranks call; the time-out starts when those of this node have come.

        Raises:
            CollectiveMismatchError: They call something else.
        """
        operation = self._operation
        operation.patience.restart()
        operation.run_on_node(copy.copy(operation.request), compares_only=True)
        operation.patience.restart()  # the node's ranks have all come: their deadlines are alike
        if operation.context.is_node_leader:
            self._announced().compare()

    def _announced(self) -> Headers:
        if self._headers is None:
            self._headers = Headers(self._operation)
        return self._headers


def await_leader(operation: Operation) -> None:
    """Hold this node's ranks until their leader knows that the other nodes agree.

    Programs begin with this if ranks other than the leaders use the network.
    """
    if len(operation.context.local_ranks) > 1:
        operation.step(_native.Op.barrier, (), ())


def all_agree(operation: Operation, mine: bool) -> bool:
    """Whether all ranks of this node say yes."""
    if len(operation.context.local_ranks) == 1:
        return mine
    answer = operation.context.scratch("answer", 1)
    ctypes.memset(answer, mine, 1)
    vote = _native.Request(
        _native.Op.all_reduce,
        _native.DType.uint8,
        (),
        ((answer, 1),),
        operation.request.timeout_s,
        _native.ReduceOp.min,
    )
    operation.run_on_node(vote)
    return ctypes.string_at(answer, 1) != b"\0"
