"""Every loss and every metric of Keras means what it means in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras.names import BACKENDS

LIMIT_S = 180.0  # of a job: compilers take their time
DEFAULT = {"torch": [(2, True), (3, False)], "tensorflow": [(2, False)], "jax": [(2, False)]}
"""Numbers of ranks, and whether rows are weighted, without `make test-long`: each rank compiles."""


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    """What plain Keras makes, by backend and whether rows are weighted."""
    return {}


@pytest.mark.versions
def test_the_tables_have_all(keras_pool: Any) -> None:
    (missing,) = keras_pool("torch", 1).run("from tests.keras.builtin import missing as main")
    assert missing == []


@pytest.mark.parametrize(
    ("backend", "world", "weighted"),
    [
        pytest.param(*(backend, *job), marks=[] if job in DEFAULT[backend] else pytest.mark.long)
        for backend in BACKENDS
        for job in ((2, False), (2, True), (3, False))
    ],
)
@pytest.mark.timeout(2 * LIMIT_S + 20)
def test_equal_one_process(
    keras_pool: Any, results: dict[Any, Any], backend: str, world: int, weighted: bool
) -> None:
    main = "from tests.keras.builtin import train as main"
    pool = keras_pool(backend, world)
    if world == 2:
        *ranks, results[backend, weighted] = pool.run_beside_one(main, weighted, timeout_s=LIMIT_S)
    else:
        ranks = pool.run(main, weighted, timeout_s=LIMIT_S)
    if (backend, weighted) not in results:
        one = keras_pool(backend, 1)
        (results[backend, weighted],) = one.run(main, weighted, timeout_s=LIMIT_S)
    alone = results[backend, weighted]
    assert alone["kernels"]
    wrong = []
    for part, values in alone.items():
        for name, expected in values.items():
            assert np.isfinite(expected).all(), name
            for rank, found in enumerate(ranks):
                if not np.allclose(found[part][name], expected, rtol=3e-5, atol=3e-5):
                    difference = np.abs(np.asarray(found[part][name]) - expected).max()
                    wrong.append(f"rank {rank}: {part} {name} by {difference:.1e}")
    assert not wrong, "\n".join(wrong)
