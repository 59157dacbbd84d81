"""Ranks with TensorFlow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras.conftest import first_ranks


@pytest.fixture
def ranks(rank_pools: Any) -> Any:
    """`ranks(n)`: n kept ranks with TensorFlow."""
    return lambda n: first_ranks(rank_pools, "tensorflow", n)
