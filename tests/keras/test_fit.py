"""Everything that goes into fit, evaluate and predict means what it means in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras.cases import CASES, run
from tests.keras.first_ranks import BACKENDS, assert_same


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    """By backend, number of ranks and case what has come out already; 1: of plain Keras."""
    return {}


def marks(backend: str, world: int, name: str) -> list[Any]:
    case = CASES[name]
    versions = [pytest.mark.versions] if world == 2 and case.versions else []
    long = backend in case.long or (world == 3 and backend not in case.on_three)
    return versions + ([pytest.mark.long] if long else [])


@pytest.mark.parametrize(
    ("backend", "world", "name"),
    [
        pytest.param(backend, world, name, marks=marks(backend, world, name))
        for backend in BACKENDS
        for world in (2, 3)
        for name, case in sorted(CASES.items())
        if world == 2 or case.on_three
    ],
)
def test_equals_one_process(
    keras_pool: Any, results: dict[Any, Any], backend: str, world: int, name: str
) -> None:
    case = CASES[name]
    if reason := case.unsupported.get(backend):
        pytest.skip(reason)
    pool = keras_pool(backend, world)
    if world == 2 and case.tolerance is not None:
        *ranks, results[backend, 1, name] = pool.run_beside_one(run, name)
    else:
        ranks = pool.run(run, name)
    results[backend, world, name] = ranks[0]
    for other in ranks[1:]:
        assert_same(other, ranks[0], 0.0, "")
    if case.tolerance is not None:
        alone = result_of(1, backend, name, keras_pool, results)
        assert_same(ranks[0], alone, case.tolerance, "")


def result_of(world: int, backend: str, name: str, keras_pool: Any, results: dict[Any, Any]) -> Any:
    """What rank 0 makes of a case."""
    if (key := (backend, world, name)) not in results:
        results[key] = keras_pool(backend, world).run(run, name)[0]
    return results[key]


@pytest.mark.parametrize("name", ["Shuffled", "Dropout"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shuffling_and_dropout_are_reproducible(
    keras_pool: Any, results: dict[Any, Any], backend: str, name: str
) -> None:
    before = result_of(2, backend, name, keras_pool, results)
    assert_same(before, keras_pool(backend, 2).run(run, name)[0], 0.0, name)
