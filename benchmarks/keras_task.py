"""In a rank: trains a Keras model with one of several methods."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from benchmarks.libraries.base import Place
from sdp_plugins.core.tensor_lists import FusedAllReduce

FEATURES, OUTPUTS = 1024, 208
WARM_UP_STEPS = 2


class KerasTask:
    """The commands of `keras` in its ranks.

    Args:
        place: This rank's position.
        backend: Keras' backend.
        layers: Number of hidden layers.
        width: Width of the hidden layers.
        rows: Rows of the global batch.
        optimizer: Keras' name of it.
        workers: Addresses of the ranks for MultiWorkerMirroredStrategy; empty: do not measure it.
        elastic: Whether to measure an elastic strategy, too.
    """

    def __init__(
        self,
        place: Place,
        backend: str,
        layers: int,
        width: int,
        rows: int,
        optimizer: str,
        workers: list[str],
        elastic: bool,
    ) -> None:
        os.environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", JAX_PLATFORMS="cpu")
        self.place, self.rows, self._layers, self._width = place, rows, layers, width
        self._optimizer = optimizer
        self._strategies: list[Any] = []
        scopes = {"mwms": self._mirrored(workers)} if workers else self._ours(elastic)
        self._models = {way: self._build(scope) for way, scope in scopes.items()}

    def parameters(self) -> int:
        """Return the model's number of parameters."""
        return int(next(iter(self._models.values())).count_params())

    def run(self, way: str, steps: int) -> list[float]:
        """Return the seconds of each step; all ranks start together."""
        if way == "alone":
            return self._communicate(steps)
        rows = self.rows // self.place.ranks if way == "no_comm" else self.rows
        count = rows * (steps + WARM_UP_STEPS)
        random = np.random.default_rng(1)
        x = random.random((count, FEATURES), np.float32)
        y = random.random((count, OUTPUTS), np.float32)
        timer = _timer()
        if self._strategies:
            self._strategies[0].group.barrier()
        self._models[way].fit(
            x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[timer], epochs=1
        )
        return list(timer.seconds[WARM_UP_STEPS:])

    def close(self) -> None:
        """Leave the group."""
        for strategy in self._strategies:
            strategy.close()

    def _communicate(self, steps: int) -> list[float]:
        """Return the seconds of averaging tensors with the gradients' shapes."""
        sizes = [tuple(v.shape) for v in self._models["smddp"].trainable_variables]
        gradients = [np.ones(size, np.float32) for size in reversed(sizes)]
        group = self._strategies[0].group
        reduce, seconds = FusedAllReduce(group), []
        for _ in range(steps + WARM_UP_STEPS):
            group.barrier()
            begin = time.perf_counter()
            reduce(gradients, "avg")
            seconds.append(time.perf_counter() - begin)
        return seconds[WARM_UP_STEPS:]

    def _ours(self, elastic: bool) -> dict[str, AbstractContextManager[Any]]:
        from sdp_plugins.keras import SMDDPStrategy

        scopes: dict[str, AbstractContextManager[Any]] = {"no_comm": nullcontext()}
        for way in ("smddp", "elastic") if elastic else ("smddp",):
            self._strategies.append(SMDDPStrategy(elastic=way == "elastic"))
            scopes[way] = self._strategies[-1].scope()
        return scopes

    def _mirrored(self, workers: list[str]) -> AbstractContextManager[Any]:
        task = {"type": "worker", "index": self.place.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        import tensorflow as tf
        from keras.src.backend.tensorflow import trainer

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # With this strategy fit fails (keras#20585): Keras reduces a first batch, to build the
        # model, and the logs in ways that TensorFlow refuses. This patch skips both.
        trainer.TensorFlowTrainer._maybe_symbolic_build = lambda *args, **kwargs: None
        trainer._collective_all_reduce_multi_worker = lambda strategy: False
        scope: AbstractContextManager[Any] = strategy.scope()
        return scope

    def _build(self, scope: AbstractContextManager[Any]) -> Any:
        import keras

        with scope:
            hidden = [keras.layers.Dense(self._width, "relu") for _ in range(self._layers)]
            model = keras.Sequential(
                [keras.Input((FEATURES,)), *hidden, keras.layers.Dense(OUTPUTS)]
            )
            model.compile(self._optimizer, "mse")
        return model


def _timer() -> Any:
    import keras

    class Timer(keras.callbacks.Callback):  # type: ignore[misc]
        """Records the seconds of each step; waits for JAX, which is asynchronous."""

        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []
            self._begin = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            _wait()(logs)
            self.seconds.append(time.perf_counter() - self._begin)

    return Timer()


def _wait() -> Callable[[Any], Any]:
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        wait: Callable[[Any], Any] = jax.block_until_ready
        return wait
    return lambda logs: None
