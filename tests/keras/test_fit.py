"""Everything that goes into fit, evaluate and predict means what it means in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras import names
from tests.keras.names import BACKENDS

LIMIT_S = 280.0  # of a case: compilers take their time; what hangs longer ends the session


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    """By backend, number of ranks and case what has come out already; 1: of plain Keras."""
    return {}


def marks(world: int, case: str) -> list[Any]:
    versions = [pytest.mark.versions] if world == 2 and case in names.IN_ALL_VERSIONS else []
    return versions + ([pytest.mark.long] if case in names.LONG else [])


@pytest.mark.parametrize(
    ("backend", "world", "case"),
    [
        pytest.param(
            *(backend, world, case),
            marks=marks(world, case),
        )
        for backend in BACKENDS
        for world, cases in ((2, names.CASES), (3, names.UNEVEN))
        for case in cases
    ],
)
def test_equals_one_process(
    keras_pool: Any, results: dict[Any, Any], backend: str, world: int, case: str
) -> None:
    if reason := names.unsupported(backend, case):
        pytest.skip(reason)
    pool, compared = keras_pool(backend, world), case not in names.WITHOUT_EQUAL
    if world == 2 and compared:
        *ranks, alone = pool.run_beside_one(names.RUN, case, timeout_s=LIMIT_S)
        results[backend, 1, case] = alone
    else:
        ranks = pool.run(names.RUN, case, timeout_s=LIMIT_S)
    results[backend, world, case] = ranks[0]
    for other in ranks[1:]:
        assert_same(other, ranks[0], 0.0, "")
    if compared:
        alone = plain(backend, case, keras_pool, results)
        assert_same(ranks[0], alone, names.TOLERANCE.get(case, 2e-5), "")


def plain(backend: str, case: str, keras_pool: Any, results: dict[Any, Any]) -> Any:
    """What plain Keras makes of a case."""
    if (key := (backend, 1, case)) not in results:
        (results[key],) = keras_pool(backend, 1).run(names.RUN, case, timeout_s=LIMIT_S)
    return results[key]


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


@pytest.mark.parametrize("case", ["Shuffled", "Dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shuffling_and_dropout_are_reproducible(
    keras_pool: Any, results: dict[Any, Any], backend: str, case: str
) -> None:
    if (key := (backend, 2, case)) not in results:
        results[key] = keras_pool(backend, 2).run(names.RUN, case, timeout_s=LIMIT_S)[0]
    again = keras_pool(backend, 2).run(names.RUN, case, timeout_s=LIMIT_S)[0]
    assert_same(results[key], again, 0.0, case)
