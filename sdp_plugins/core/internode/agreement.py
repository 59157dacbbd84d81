"""Checks that all ranks call the same operation before any of its data moves."""

from __future__ import annotations

import copy
import ctypes

from .. import _native
from .headers import Headers
from .operation import Operation


class Agreement:
    """The check of one operation.

    Args:
        operation: The operation that this rank calls.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._headers: Headers | None = None

    def announce(self) -> bool:
        """Send this node's header to the other nodes, unless it was sent; leaders only.

        Returns:
            Whether all nodes are known to call the same operation; does not wait for them.
        """
        return self._announced().arrived()

    def reach(self) -> None:
        """Compare the calls of all ranks; the time-out starts when this node's ranks have arrived.

        Raises:
            CollectiveMismatchError: Ranks call different operations.
        """
        operation = self._operation
        operation.deadlines.restart()
        operation.run_on_node(copy.copy(operation.request), compares_only=True)
        operation.deadlines.restart()  # the node's ranks have all arrived: they share a deadline
        if operation.context.is_node_leader:
            self._announced().compare()

    def _announced(self) -> Headers:
        if self._headers is None:
            self._headers = Headers(self._operation)
        return self._headers


def await_leader(operation: Operation) -> None:
    """Hold this node's ranks until their leader knows that the other nodes agree.

    Programs call this first if ranks other than the leaders use the network.
    """
    if len(operation.context.local_ranks) > 1:
        operation.step(_native.Op.barrier, (), ())


def all_agree(operation: Operation, mine: bool) -> bool:
    """Whether `mine` is true on all ranks of this node."""
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
