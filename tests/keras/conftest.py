"""Ranks that keep Keras, on one of its backends, from case to case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.keras.first_ranks import FirstRanks, first_ranks

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", "torch")
    import keras  # noqa: F401 - of tests that are imported here and run on ranks; the fastest


@pytest.fixture
def keras_pool(rank_pools: Any) -> Callable[[str, int], FirstRanks]:
    """`keras_pool(backend, n)`: n kept ranks with Keras on that backend."""
    return lambda backend, n: first_ranks(rank_pools, backend, n)
