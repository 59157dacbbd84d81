"""Ranks that train by themselves between outer steps: `SMDDPLocalUpdates`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers, ops

from sdp_plugins.core import CollectiveMismatchError, Group
from sdp_plugins.keras import OuterStep, SMDDPLocalUpdates, SMDDPStrategy, local_updates
from tests.keras.first_ranks import BACKENDS, on_ranks
from tests.keras.models import BATCH, CLASSES, FEATURES, arrays, crossentropy, dense
from tests.keras.strategies import compiled, strategy, values

EPOCHS = 2


def model_of(rank: int, optimizer: Any = "sgd") -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5 + rank)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8),
            layers.BatchNormalization(momentum=0.5),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(optimizer, crossentropy())
    return model


def own_rows(rank: int, world: int) -> tuple[Any, Any]:
    """The rows that a strategy would give this rank, batch by batch."""

    def rows(data: Any) -> Any:
        batches = data.reshape(-1, world, BATCH // world, *data.shape[1:])
        return batches[:, rank].reshape(-1, *data.shape[1:])

    x, y = arrays()
    return rows(x), rows(y)


@on_ranks(2, BACKENDS)
def test_ranks_train_alone_and_end_equal(rank: int, world: int, tmp_path: Path) -> list[Any]:
    model, seen = model_of(rank, "adam"), []

    class Before(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            seen.extend(ops.convert_to_numpy(v) for v in model.trainable_variables)

    local = SMDDPLocalUpdates(every=4, fragments=2, delay=1)
    try:
        fit = {"batch_size": BATCH // world, "verbose": 0, "shuffle": False}
        model.fit(*own_rows(rank, world), epochs=EPOCHS, callbacks=[Before(), local], **fit)
        found = local.group.exchange(b"".join(np.ascontiguousarray(v).tobytes() for v in seen))
        assert found[0] != found[1]
        model.fit(*own_rows(rank, world), epochs=1, callbacks=[local], **fit)  # goes on
        assert local._updates is not None and local._updates.steps == 3 * (EPOCHS + 1)
    finally:
        local.close()
    return [ops.convert_to_numpy(v) for v in model.variables]


@on_ranks(2, BACKENDS)
def test_an_average_in_every_batch_is_a_strategy(rank: int, world: int, tmp_path: Path) -> None:
    fit = {"epochs": EPOCHS, "verbose": 0, "shuffle": False}
    with strategy() as made:
        model = compiled(made)
        start = [v.copy() for v in values(model)]
        model.fit(*arrays(), batch_size=BATCH, **fit)
        expected = values(model)
    alone = dense()
    alone.compile("sgd", crossentropy())
    alone.build((None, FEATURES))
    for variable, value in zip(alone.variables, start, strict=False):
        variable.assign(value)
    local = SMDDPLocalUpdates(every=1, outer="average")
    try:
        alone.fit(*own_rows(rank, world), batch_size=BATCH // world, callbacks=[local], **fit)
    finally:
        local.close()
    for mine, wanted in zip(alone.trainable_variables, expected, strict=False):
        np.testing.assert_allclose(ops.convert_to_numpy(mine), wanted, rtol=1e-4, atol=1e-5)


@on_ranks(2, BACKENDS)
def test_resumed_exactly(rank: int, world: int, tmp_path: Path) -> None:
    """A training that goes on from each rank's own files ends with the same bits."""
    form = {"every": 4, "fragments": 2, "delay": 1}
    fit = {"batch_size": BATCH // world, "verbose": 0, "shuffle": False}

    class Save(keras.callbacks.Callback):
        """In the middle of a training, when the ranks' models differ."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.model.save(tmp_path / f"{rank}.keras")
                self.state = local.state_dict()

    def train(model: Any, callbacks: list[Any], first: int) -> list[Any]:
        x, y = own_rows(rank, world)
        model.fit(x, y, epochs=3, initial_epoch=first, callbacks=callbacks, **fit)
        return [ops.convert_to_numpy(v) for v in model.trainable_variables]

    local, save = SMDDPLocalUpdates(**form), Save()
    try:
        whole = train(model_of(rank, "adam"), [local, save], 0)
    finally:
        local.close()
    again = SMDDPLocalUpdates(**form)
    try:
        with pytest.raises(RuntimeError, match="no state before `fit` has begun"):
            again.state_dict()
        again.load_state_dict(save.state)
        resumed = train(keras.models.load_model(tmp_path / f"{rank}.keras"), [again], 1)
    finally:
        again.close()
    assert all(map(np.array_equal, whole, resumed))


@on_ranks(2, ("tensorflow",))
def test_other_weights_between_fits(rank: int, world: int, tmp_path: Path) -> None:
    """What a program puts into the model is where the next `fit` begins, not a step of training."""
    model = model_of(rank)
    local = SMDDPLocalUpdates(every=1000)
    fit = {"batch_size": BATCH // world, "verbose": 0, "callbacks": [local]}
    try:
        model.fit(*own_rows(rank, world), **fit)
        others = [np.full(w.shape, 3.0) for w in model.get_weights()]
        model.set_weights(others)
        model.optimizer.learning_rate = 0.0
        model.fit(*own_rows(rank, world), **fit)
    finally:
        local.close()
    for variable in model.trainable_variables:
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), 3.0)


@on_ranks(2, ("tensorflow",))
def test_arguments(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=2, fragments=3"):
        SMDDPLocalUpdates(every=2, fragments=3)
    with Group.from_env(name="mine") as group:
        with pytest.raises(ValueError, match="wire='int8 stochastic' cannot be used"):
            SMDDPLocalUpdates(wire="int8 stochastic")
        with pytest.raises(ValueError, match="has its own wire dtype"):
            SMDDPLocalUpdates(wire="int8", group=group)
        double = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2, dtype="float64")])
        double.compile("sgd", crossentropy())
        with pytest.raises(ValueError, match="weights of float64 would be rounded"):
            double.fit(*arrays(), verbose=0, callbacks=[SMDDPLocalUpdates(group=group)])
        unbuilt = keras.Sequential([layers.Dense(CLASSES)])
        unbuilt.compile("sgd", crossentropy())
        with pytest.raises(
            ValueError, match=r"has no weights yet.*Hint: begin it with keras.Input"
        ):
            unbuilt.fit(*arrays(), verbose=0, callbacks=[SMDDPLocalUpdates(group=group)])
        local = SMDDPLocalUpdates(outer=OuterStep(0.5, 0.0), group=group, fragments=9)
        with pytest.raises(ValueError, match="the model has 6 parameters that are trained"):
            model_of(rank).fit(*arrays(), verbose=0, callbacks=[local])
        with SMDDPStrategy().scope():
            averaged = model_of(rank)
        with mock.patch.object(local_updates.log, "warning") as warning:
            averaged.fit(*arrays(), verbose=0, callbacks=[SMDDPLocalUpdates(group=group)])
        assert "averages the gradients of all these ranks" in warning.call_args[0][0]


@on_ranks(2, ("tensorflow",))
def test_one_rank_continues_and_another_begins(rank: int, world: int, tmp_path: Path) -> None:
    model, local = model_of(rank), SMDDPLocalUpdates()
    fit = {"batch_size": BATCH // world, "verbose": 0, "callbacks": [local]}
    try:
        model.fit(*own_rows(rank, world), **fit)
        if rank == 0:
            local.load_state_dict(local.state_dict())
        begun = r"load_state_dict\(\) of step .*", "begin with rank 0's parameters"
        said = f"rank 0: {begun[0]}; rank 1: {begun[1]}. Hint: save"
        with pytest.raises(CollectiveMismatchError, match=said):
            model.fit(*own_rows(rank, world), **fit)
    finally:
        local.close()


@on_ranks(2, BACKENDS)
def test_weights_of_16_bits(rank: int, world: int, tmp_path: Path) -> None:
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, dtype="bfloat16"),
            layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    model.compile("sgd", crossentropy())
    local = SMDDPLocalUpdates(every=2, delay=1)
    try:
        fit = {"batch_size": BATCH // world, "verbose": 0, "callbacks": [local]}
        model.fit(*own_rows(rank, world), **fit)
        weights = local_updates._Weights(model, 1)
        values, held = (np.zeros(weights.counts[0], np.float32) for _ in range(2))
        weights.read(0, values)
        told = local.group.exchange(values.tobytes())
        assert told[0] == told[1]
        values[:] = np.random.default_rng(0).random(len(values))
        weights.write(0, values)
        weights.read(0, held)
        rounded = weights.rounded(0, values)
        assert rounded is not None and not np.array_equal(values, held)
        np.testing.assert_array_equal(rounded, held)
    finally:
        local.close()
