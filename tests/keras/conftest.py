"""Ranks that keep Keras, on one of its backends, from case to case."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from tests.keras.first_ranks import PROCESSES, FirstRanks


def environment(backend: str, fast_compiler: bool = True) -> dict[str, str]:
    """A rank's, with one thread for each of its framework's pools.

    XLA optimizes nothing: most of the time of JAX's cases would be its compiler's. Its faster
    compiler gives NaN for some models in a single process (jax 0.10.2, `make stress`, case 2).
    """
    xla = ["--xla_cpu_multi_thread_eigen=false", "--xla_backend_optimization_level=0"]
    if (
        fast_compiler and backend == "jax" and not version("jax").startswith("0.5.")
    ):  # ends if it knows no flag
        xla.append("--xla_cpu_use_fusion_emitters=false")
    return {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "XLA_FLAGS": " ".join(xla),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def first_ranks(rank_pools: Any, backend: str, n: int) -> FirstRanks:
    """n kept ranks with Keras on a backend."""
    return FirstRanks(rank_pools.pool(PROCESSES, environment(backend)), n)


@pytest.fixture
def keras_pool(rank_pools: Any) -> Callable[[str, int], FirstRanks]:
    """`keras_pool(backend, n)`: n kept ranks with Keras on that backend."""
    return lambda backend, n: first_ranks(rank_pools, backend, n)
