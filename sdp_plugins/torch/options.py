"""Conversion of c10d's option objects and positional forms to a Group's arguments."""

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
"""Whether a call is asynchronous, and its timeout in seconds (None: the group's timeout)."""
Launch = Callable[..., Any]
"""Starts a core operation when called with `async_op=` and `timeout_s=`."""

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
    """Convert a c10d timeout for a Group; None means the group's own timeout.

    c10d represents "not given" as -1 ms, as zero or as None, depending on the call.
    """
    if timeout is None or timeout == UNSET:
        return None
    value = timeout.total_seconds()
    return value if value > 0 else None


def group_seconds(timeout: timedelta, config: Config) -> float | None:
    """Return a group's timeout: the caller's, else SDP_TIMEOUT_S, else torch's default."""
    if timeout == default_pg_timeout and config.timeout_s is not None:
        return config.timeout_s
    return seconds(timeout)


def _given(options: Options) -> CallOptions:
    return options.asyncOp, seconds(options.timeout)


def call_options(options: Options, timeout: timedelta | None = None) -> CallOptions:
    """Return whether a call is asynchronous, and its timeout.

    Args:
        options: The option object; a timedelta or None in the positional forms.
        timeout: The timeout argument of the positional forms.
    """
    if type(options) in OPTIONS:
        return _given(options)
    return True, seconds(timeout or options)


def op_and_options(options: Options, timeout: timedelta | None) -> tuple[Any, CallOptions]:
    """Return c10d's reduction, `options` itself in allreduce(t, ReduceOp.MAX), and call options."""
    if type(options) in OPTIONS:
        return options.reduceOp, _given(options)
    if options is None or isinstance(options, timedelta):
        return dist.ReduceOp.SUM, call_options(options, timeout)
    return options, call_options(None, timeout)


def root_and_options(options: Options, timeout: timedelta | None) -> tuple[int, CallOptions]:
    """Return the root, which is `options` itself in broadcast(t, 1), and the call options."""
    if type(options) in OPTIONS:
        return options.rootRank, _given(options)
    return options or 0, call_options(None, timeout)
