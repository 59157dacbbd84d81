"""Everything that goes into fit, evaluate and predict means what it means in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras import names
from tests.keras.names import BACKENDS

LIMIT_S = 200.0  # of a case: compilers take their time


@pytest.fixture(scope="module")
def alone_results() -> dict[Any, Any]:
    """What plain Keras makes of a case on a backend, once it has run."""
    return {}


@pytest.mark.parametrize(
    ("backend", "world", "case"),
    [
        (backend, world, case)
        for backend in BACKENDS
        for world, cases in ((2, names.CASES), (3, names.UNEVEN))
        for case in cases
    ],
)
@pytest.mark.timeout(2 * LIMIT_S)
def test_equals_one_process(
    keras_pool: Any, alone_results: dict[Any, Any], backend: str, world: int, case: str
) -> None:
    if reason := names.unsupported(backend, case):
        pytest.skip(reason)
    ranks = keras_pool(backend, world).run(names.RUN, case, timeout_s=LIMIT_S)
    for other in ranks[1:]:
        assert_same(other, ranks[0], 0.0, "")
    if case not in names.WITHOUT_EQUAL:
        if (backend, case) not in alone_results:
            pool = keras_pool(backend, 1)
            (alone_results[backend, case],) = pool.run(names.RUN, case, timeout_s=LIMIT_S)
        alone = alone_results[backend, case]
        assert_same(ranks[0], alone, names.TOLERANCE.get(case, 2e-5), "")


def assert_same(one: Any, other: Any, tolerance: float, where: str) -> None:
    if isinstance(one, dict):
        assert sorted(one) == sorted(other), where
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, tolerance, f"{where}[{index}]")
    else:
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            np.asarray(other, np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=where,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_shuffling_and_dropout_are_reproducible(keras_pool: Any, backend: str) -> None:
    for case in ("Shuffled", "Dropout"):
        once, again = (keras_pool(backend, 2).run(names.RUN, case)[0] for _ in range(2))
        assert_same(once, again, 0.0, case)
