"""Two models in one process, each trained by a thread and a strategy of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import keras
import numpy as np

from sdp_plugins.keras import SMDDPStrategy
from tests.keras.cases import (
    Case,
    LossBySampleWeight,
    OwnMetrics,
    arrays,
    crossentropy,
    dense,
    finish,
)
from tests.ranks import HANG_S


class TakesTurns(keras.callbacks.Callback):
    """Begins each batch when the other thread begins its own."""

    def __init__(self, turns: Barrier) -> None:
        super().__init__()
        self.turns = turns

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.turns.wait(HANG_S)


def train(kind: type[Case], strategy: SMDDPStrategy, turns: Barrier) -> dict[str, Any]:
    """One model, from its scope to its predictions; of a batch it has other rows than the other."""

    class Together(kind):  # type: ignore[misc, valid-type]
        def callbacks(self) -> list[Any]:
            return [TakesTurns(turns)]

    case = Together()
    with strategy.scope():
        turns.wait(HANG_S)
        model = case.build()
        model.compile(**case.compile_options())
        turns.wait(HANG_S)
    random = np.random.default_rng(1)  # seeds of initializers are drawn for all threads alike
    model.set_weights([random.normal(size=each.shape) for each in model.get_weights()])
    return finish(case, model)


def two_models(rank: int, world: int) -> list[list[dict[str, Any]]]:
    """What training one after the other makes, and training at once."""
    keras.utils.clear_session()
    kinds = (OwnMetrics, LossBySampleWeight)
    found = []
    for threads in (1, 2):
        strategies = [SMDDPStrategy() for _ in kinds]  # in the same order on all ranks
        turns = Barrier(threads)
        pools = [ThreadPoolExecutor(1) for _ in kinds]
        try:
            trained = []
            for pool, kind, strategy in zip(pools, kinds, strategies, strict=True):
                trained.append(pool.submit(train, kind, strategy, turns))
                if threads == 1:
                    trained[-1].result()
            found.append([each.result() for each in trained])
        finally:
            for pool, strategy in zip(pools, strategies, strict=True):
                pool.shutdown()
                strategy.close()
    return found


def one_strategy(rank: int, world: int) -> str:
    """What a second thread is told while the first one trains."""
    keras.utils.clear_session()
    strategy = SMDDPStrategy()
    told: list[str] = []

    class Second(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            with ThreadPoolExecutor(1) as pool:
                told.append(str(pool.submit(other.predict, arrays()[0]).exception()))

    try:
        with strategy.scope():
            model, other = dense(), dense()
            for each in (model, other):
                each.compile("sgd", crossentropy())
        model.fit(*arrays(), verbose=0, callbacks=[Second()])
    finally:
        strategy.close()
    (text,) = told
    return text
