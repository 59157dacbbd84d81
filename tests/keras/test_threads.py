"""Two models may be trained from two threads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras.names import BACKENDS
from tests.keras.test_fit import assert_same

LIMIT_S = 280.0  # compilers take their time


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_once_as_one_after_the_other(keras_pool: Any, backend: str) -> None:
    main = "from tests.keras.thread_jobs import two_models as main"
    ranks = keras_pool(backend, 2).run(main, timeout_s=LIMIT_S)
    one_by_one, at_once = ranks[0]
    assert one_by_one[0]["variables"].keys() & one_by_one[1]["variables"].keys()
    assert_same(at_once, one_by_one, 0.0, backend)
    assert_same(ranks[1], ranks[0], 0.0, backend)


def test_one_strategy_serves_one_thread(keras_pool: Any) -> None:
    main = "from tests.keras.thread_jobs import one_strategy as main"
    for text in keras_pool("torch", 2).run(main):
        assert (
            "another thread trains a model under the same strategy. Hint: make a strategy" in text
        )
