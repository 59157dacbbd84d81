"""A pool's group: made by the first case that needs it, used by all later ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sdp_plugins.core import Group
from tests.core.values import Array, storage
from tests.ranks import kept

TIMEOUT_S = 30.0
REGISTERED_BYTES = 20 * 2**20


def kept_group() -> Group:
    """This rank's group."""
    if "group" not in kept:
        kept["group"] = Group.from_env(timeout_s=TIMEOUT_S)
    return kept["group"]


@contextmanager
def settings(**variables: str) -> Iterator[None]:
    """Environment variables for a group that is made in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def registered(count: int, dtype: str) -> Array:
    """An array in memory that the peers map; the next call gives the same memory again."""
    if "registered" not in kept:
        kept["registered"] = kept_group().allocate(REGISTERED_BYTES)
    return np.frombuffer(kept["registered"], storage(dtype), count)
