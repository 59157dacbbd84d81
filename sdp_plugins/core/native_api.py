"""Gives native code of plug-ins the core's functions and a group's endpoint."""

from __future__ import annotations

import numpy as np

from . import _native
from .group import Group


def api() -> int:
    """Address of an ``SdpApi``."""
    return _native.api()


def endpoint(group: Group) -> int:
    """Address of a group's ``SdpEndpoint``; the same one each time."""
    return group.issuer.sdp_endpoint


def all_agree(group: Group, available: bool) -> bool:
    """Whether something is available on all ranks, which must do alike."""
    everyone_has_it = np.array([available], np.uint8)
    group.all_reduce(everyone_has_it, "min")
    return bool(everyone_has_it[0])


def agreed_endpoint(group: Group, available: bool) -> int | None:
    """A group's endpoint if native operations are available on all ranks."""
    return endpoint(group) if all_agree(group, available) else None
