"""Gives native code of plug-ins a group's endpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from .group import Group
from .native_build import CompileError

log = logging.getLogger("sdp_plugins.core")


def all_agree(group: Group, available: bool) -> bool:
    """Whether something is available on all ranks, which must do alike."""
    everyone_has_it = np.array([available], np.uint8)
    group.all_reduce(everyone_has_it, "min")
    return bool(everyone_has_it[0])


def agreed_endpoint(group: Group, compiled: Callable[[], object]) -> int | None:
    """Address of a group's ``SdpEndpoint`` if all ranks have an operation, the same each time.

    `compiled` compiles and loads it, or raises ``CompileError``; then it is logged why not.
    """
    try:
        compiled()
        available = True
    except CompileError as error:
        log.warning("tensors are copied by Python functions, which is slower: %s", error)
        available = False
    return group.issuer.sdp_endpoint if all_agree(group, available) else None
