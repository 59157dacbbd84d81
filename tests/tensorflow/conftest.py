"""Ranks with TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.keras.first_ranks import FirstRanks, first_ranks


@pytest.fixture
def ranks(rank_pools: Any) -> Callable[[int], FirstRanks]:
    """`ranks(n)`: n kept ranks with TensorFlow."""
    return lambda n: first_ranks(rank_pools, "tensorflow", n)
