"""Checks that all ranks call the same operation before any of its data moves."""

from __future__ import annotations

import copy

from .. import _native
from . import headers
from .operation import Operation


def agree(operation: Operation) -> None:
    """Compare the calls of all ranks; the time-out starts when this node's ranks have arrived.

    Raises:
        CollectiveMismatchError: Ranks call different operations.
    """
    operation.deadlines.restart()
    operation.run_on_node(copy.copy(operation.request), compares_only=True)
    operation.deadlines.restart()  # the node's ranks have all arrived: they share a deadline
    if operation.context.is_node_leader:
        headers.compare(operation)


def await_leader(operation: Operation) -> None:
    """Hold this node's ranks until their leader knows that the other nodes agree.

    Programs call this first if ranks other than the leaders use the network.
    """
    if len(operation.context.local_ranks) > 1:
        operation.step(_native.Op.barrier, (), ())
