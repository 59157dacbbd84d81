"""What native code of plug-ins is given at run time: the core's functions, and a group's way in."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from . import _native
from .group import Group
from .internode.spanning_group import SpanningGroup

_endpoints: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def api() -> int:
    """Address of an ``SdpApi``."""
    return _native.api()


def endpoint(group: Group) -> int:
    """Address of a group's ``SdpEndpoint``; the same one each time."""
    if group not in _endpoints:
        native = group._native
        if isinstance(native, SpanningGroup):
            _endpoints[group] = _native.make_endpoint(_weak_submit(native))
        else:
            _endpoints[group] = native.endpoint()
    return _endpoints[group]


def everywhere(group: Group, available: bool) -> bool:
    """Whether something is available on all ranks, which must do alike."""
    everyone_has_it = np.array([available], np.uint8)
    group.all_reduce(everyone_has_it, "min")
    return bool(everyone_has_it[0])


def agreed_endpoint(group: Group, available: bool) -> int | None:
    """A group's endpoint if native operations are available on all ranks."""
    return endpoint(group) if everywhere(group, available) else None


def _weak_submit(native: SpanningGroup) -> object:
    group = weakref.ref(native)

    def submit(
        op: _native.Op,
        dtype: _native.DType,
        reduce_op: _native.ReduceOp,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        timeout_s: float,
        layout: int,
    ) -> _native.Work:
        held = group()
        if held is None:
            raise RuntimeError("the group is closed. Hint: make a new group.")
        return held.submit(op, dtype, reduce_op, 1.0, -1, sends, recvs, timeout_s, layout)

    return submit
