"""Ranks that keep Keras, on one of its backends, from case to case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import RankPool


def environment(backend: str) -> dict[str, str]:
    """A rank's, with one thread for each of its framework's pools."""
    return {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


@pytest.fixture
def keras_pool(rank_pools: Any) -> Callable[[str, int], RankPool]:
    """`keras_pool(backend, n)`: n kept ranks with Keras on that backend."""
    return lambda backend, n: rank_pools.pool(n, environment(backend))
