"""What c10d's option objects and positional forms mean to a Group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from sdp_plugins.core.config import Config
from sdp_plugins.torch.internals import c10d

Options = Any  # one of c10d's option classes; they share attributes but no base
CallOptions = tuple[bool, float | None]
"""Whether a call is asynchronous, and its time-out in seconds (None: the group's)."""
Launch = Callable[..., Any]
"""Starts an operation of the core when called with `async_op=` and `timeout_s=`."""

UNSET = timedelta(milliseconds=-1)
OPTIONS = frozenset(
    {
        c10d.AllgatherOptions,
        c10d.AllreduceCoalescedOptions,
        c10d.AllreduceOptions,
        c10d.AllToAllOptions,
        c10d.BarrierOptions,
        c10d.BroadcastOptions,
        c10d.GatherOptions,
        c10d.ReduceOptions,
        c10d.ReduceScatterOptions,
        c10d.ScatterOptions,
    }
)


def seconds(timeout: timedelta | None) -> float | None:
    """A c10d time-out for a Group; None is the group's own.

    c10d writes "not given" as -1 ms, as zero, or as None, depending on the way the call took.
    """
    if timeout is None or timeout == UNSET:
        return None
    value = timeout.total_seconds()
    return value if value > 0 else None


def group_seconds(timeout: timedelta, config: Config) -> float | None:
    """A group's time-out: what the caller gave, else SDP_TIMEOUT_S, else torch's default."""
    if timeout == default_pg_timeout and config.timeout_s is not None:
        return config.timeout_s
    return seconds(timeout)


def call_options(options: Options, timeout: timedelta | None = None) -> CallOptions:
    """Mode and time-out of a call.

    Args:
        options: The option object; a timedelta or None from the positional forms.
        timeout: The time-out argument of the positional forms.
    """
    if type(options) in OPTIONS:
        return options.asyncOp, seconds(options.timeout)
    return True, seconds(timeout or options)


def op_and_options(options: Options, timeout: timedelta | None) -> tuple[Any, CallOptions]:
    """With c10d's reduction, which `options` may be itself, as in allreduce(t, ReduceOp.MAX)."""
    if type(options) in OPTIONS:
        return options.reduceOp, (options.asyncOp, seconds(options.timeout))
    if options is None or isinstance(options, timedelta):
        return dist.ReduceOp.SUM, (True, seconds(timeout or options))
    return options, (True, seconds(timeout))


def root_and_options(options: Options, timeout: timedelta | None) -> tuple[int, CallOptions]:
    """With the root, which `options` may be itself, as in broadcast(t, 1)."""
    if type(options) in OPTIONS:
        return options.rootRank, (options.asyncOp, seconds(options.timeout))
    return options or 0, (True, seconds(timeout))
