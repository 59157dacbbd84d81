"""Two models may be trained from two threads, each by a strategy of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import keras
import numpy as np

from sdp_plugins.keras import SMDDPStrategy
from tests.keras.cases import CASES
from tests.keras.first_ranks import BACKENDS, assert_same, on_ranks
from tests.keras.models import arrays, crossentropy, dense
from tests.keras.strategies import strategy
from tests.ranks import HANG_S


class TakesTurns(keras.callbacks.Callback):
    """Begins each batch when the other thread begins its own."""

    def __init__(self, turns: Barrier) -> None:
        super().__init__()
        self.turns = turns

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.turns.wait(HANG_S)


def train(name: str, strategy: SMDDPStrategy, turns: Barrier) -> dict[str, Any]:
    """One model, from its scope to its predictions; of a batch it has other rows than the other."""
    case = CASES[name]
    with strategy.scope():
        turns.wait(HANG_S)
        model = case.compiled(2)
        turns.wait(HANG_S)
    random = np.random.default_rng(1)  # seeds of initializers are drawn for all threads alike
    model.set_weights([random.normal(size=each.shape) for each in model.get_weights()])
    return case.train(model, TakesTurns(turns))


def two_models(threads: int) -> list[dict[str, Any]]:
    """What training makes: one after the other, or at once."""
    names = ("OwnMetrics", "LossBySampleWeight")
    strategies = [SMDDPStrategy() for _ in names]  # in the same order on all ranks
    turns = Barrier(threads)
    pools = [ThreadPoolExecutor(1) for _ in names]
    try:
        trained = []
        for pool, name, strategy in zip(pools, names, strategies, strict=True):
            trained.append(pool.submit(train, name, strategy, turns))
            if threads == 1:
                trained[-1].result()
        return [each.result() for each in trained]
    finally:
        for pool, strategy in zip(pools, strategies, strict=True):
            pool.shutdown()
            strategy.close()


@on_ranks(2, BACKENDS)
def test_at_once_as_one_after_the_other(rank: int, world: int) -> list[dict[str, Any]]:
    keras.utils.clear_session()
    one_by_one, at_once = two_models(1), two_models(2)
    assert one_by_one[0]["variables"].keys() & one_by_one[1]["variables"].keys()
    assert_same(at_once, one_by_one, 0.0, "")
    return at_once


@on_ranks(2)
def test_one_strategy_serves_one_thread(rank: int, world: int) -> None:
    told: list[str] = []

    class Second(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            with ThreadPoolExecutor(1) as pool:
                told.append(str(pool.submit(other.predict, arrays()[0]).exception()))

    with strategy() as made:
        with made.scope():
            model, other = dense(), dense()
            for each in (model, other):
                each.compile("sgd", crossentropy())
        model.fit(*arrays(), verbose=0, callbacks=[Second()])
    (text,) = told
    assert "another thread trains a model under the same strategy. Hint: make a strategy" in text
