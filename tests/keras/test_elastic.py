"""`SMDDPStrategy(elastic=True)`: trainings whose ranks are lost, and joined by others."""

from __future__ import annotations

import csv
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sdp_plugins.core import Group
from sdp_plugins.keras import SMDDPStrategy
from tests.faults import die
from tests.keras import first_ranks, models
from tests.keras.first_ranks import BACKENDS
from tests.launch.jobs import launch_page

pytestmark = pytest.mark.timeout(600)
ROWS, EPOCHS, BATCH = 53, 3, 8
TOLERANCE = 2e-5
Before = Callable[[str, int, int, SMDDPStrategy], None]


class Hooks(keras.callbacks.Callback):
    """Tells where the training is, and notes which batches this rank has seen."""

    def __init__(self, strategy: SMDDPStrategy, before: Before) -> None:
        super().__init__()
        self._strategy, self._before, self.epoch = strategy, before, 0
        self.batches: list[tuple[int, int]] = []

    def before(self, where: str, epoch: int, number: int) -> None:
        if self.model is not None:  # not while it is built
            self._before(where, epoch, number, self._strategy)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before("batch", self.epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append((self.epoch, batch))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before("validation", self.epoch, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.before("epoch end", epoch, 0)


class Telling(keras.layers.Layer):
    """Tells that a step is in the forward pass; only where layers are called in each step."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.hooks.before("forward", self.hooks.epoch, len(self.hooks.batches))
        return x


class Last(keras.metrics.Metric):
    """Its update comes when the step has updated the weights."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(name="last")
        self.hooks = hooks

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        self.hooks.before("updated", self.hooks.epoch, len(self.hooks.batches))

    def result(self) -> float:
        return 0.0


class PerClass(keras.metrics.Metric):
    """A metric with a number for each class."""

    def __init__(self) -> None:
        super().__init__(name="per_class")
        self.sums = self.add_weight(shape=(models.CLASSES,), initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.sums.assign_add(keras.ops.sum(predicted, axis=0))

    def result(self) -> Any:
        return self.sums + 0.0


def train(
    before: Before = lambda where, epoch, number, strategy: None,
    source: str = "arrays",
    tells: bool = False,
    normalizes: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a model on the ranks of an elastic job; rank 0 may join and be lost as any other."""
    strategy = SMDDPStrategy(elastic=True)
    hooks = Hooks(strategy, before)
    keras.utils.clear_session()  # kept processes name layers on
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(models.CLASSES)]
        if normalizes:
            layers.insert(1, keras.layers.BatchNormalization())
        model = keras.Sequential([*([Telling(hooks)] if tells else []), *layers])
        model.compile(
            options.pop("optimizer", None) or keras.optimizers.Adam(0.01),
            models.crossentropy(),
            metrics=["accuracy", *options.pop("metrics", []), *([Last(hooks)] if tells else [])],
            **options.pop("compile", {}),
        )
    callbacks = [*options.pop("callbacks", []), hooks]
    given = SOURCES[source]()
    validation = models.arrays(21)
    options = {"epochs": EPOCHS, "verbose": 0, "validation_data": validation, **options}
    try:
        history = model.fit(**given, callbacks=callbacks, **options)
        return {
            "weights": model.get_weights(),
            "history": {
                name: [np.asarray(value).tolist() for value in values]
                for name, values in history.history.items()
            },
            "epochs": history.epoch,
            "rate": float(model.optimizer.learning_rate),
            "batches": hooks.batches,
            "ranks": (strategy.rank, strategy.num_replicas_in_sync),
        }
    finally:
        strategy.close()


class Rows(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = models.arrays(ROWS)

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def _tf_data() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(models.arrays(ROWS)).shuffle(ROWS, 7).batch(BATCH)


def _loader() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(*map(torch.from_numpy, models.arrays(ROWS)))
    return DataLoader(rows, BATCH, shuffle=True)


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: dict(zip("xy", models.arrays(ROWS), strict=True), batch_size=BATCH),
    "dataset": lambda: {"x": Rows()},
    "tf.data": lambda: {"x": _tf_data()},
    "generator": lambda: {"x": (models.arrays(BATCH) for _ in range(2))},
    "loader": lambda: {"x": _loader()},
}


def alone(rank: int, world: int, *options: Any) -> dict[str, Any]:
    return train(**dict(options))


def check(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The ranks are equal, and equal one process that gets the same batches."""
    for result in results:
        for mine, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert abs(mine - wanted).max() < TOLERANCE
        assert result["epochs"] == expected["epochs"]
        assert result["history"].keys() == expected["history"].keys()
        for name, values in expected["history"].items():
            np.testing.assert_allclose(result["history"][name], values, atol=1e-4, err_msg=name)


def plain(rank: int, world: int) -> dict[str, Any]:
    """Keras without a strategy."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(models.CLASSES)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), models.crossentropy(), metrics=["accuracy"])
    given, validation = SOURCES["arrays"](), models.arrays(21)
    options = {"epochs": EPOCHS, "verbose": 0, "validation_data": validation, "shuffle": False}
    history = model.fit(**given, **options)
    history_ = {name: list(map(float, all_)) for name, all_ in history.history.items()}
    return {"weights": model.get_weights(), "history": history_, "epochs": history.epoch}


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_keras(keras_pool: Any, backend: str) -> None:
    results = keras_pool(backend, 3).run(alone, ("shuffle", False))
    check(results, keras_pool(backend, 1).run(plain)[0])


def lose(
    rank: int, world: int, victim: int, where: str, at: tuple[int, int], *options: Any
) -> dict[str, Any]:
    first: list[weakref.ref[Group]] = []
    first_is_freed: list[bool] = []

    def before(*place: Any) -> None:
        if (rank, *place[:-1]) == (victim, where, *at):
            die()
        if not first:
            first.append(weakref.ref(place[-1].group))
        if place[:-1] == ("epoch end", EPOCHS - 1, 0):
            gc.collect()
            first_is_freed.append(first[0]() is None)

    return {**train(before, **dict(options)), "former group is freed": first_is_freed}


def _lose(pool: Any, victim: int, *args: Any) -> list[dict[str, Any]]:
    with pool.start(lose, victim, *args) as ranks:
        return [ranks[rank].result() for rank in range(pool.n) if rank != victim]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_is_lost(keras_pool: Any, backend: str) -> None:
    """The others go on in the epoch; Keras calls their callbacks as without."""
    results = _lose(keras_pool(backend, 3), 0, "batch", (1, 2))
    expected = keras_pool(backend, 1).run(alone)[0]
    check(results, expected)
    for result in results:
        assert result["batches"] == expected["batches"]
        assert result["ranks"][1] == 2
        assert result["former group is freed"] == [True]  # which has mapped the lost rank's memory


@pytest.mark.parametrize(
    ("victim", "where", "at"),
    [
        (1, "forward", (1, 9)),
        (2, "updated", (1, 9)),
        (0, "validation", (1, 1)),
        (1, "epoch end", (1, 0)),
    ],
)
def test_where_it_is_lost(keras_pool: Any, victim: int, where: str, at: tuple[int, int]) -> None:
    results = _lose(keras_pool("torch", 3), victim, where, at, ("tells", True))
    expected = keras_pool("torch", 1).run(alone, ("tells", True))[0]
    if where == "updated":  # the metrics of that step are lost
        for result in (expected, *results):
            for name in ("accuracy", "loss"):
                del result["history"][name][at[0]]
    check(results, expected)


def test_layers_stay_equal(keras_pool: Any) -> None:
    """The step is taken, but what it has told the layers is this rank's alone."""
    options = ("tells", True), ("normalizes", True)
    first, second = _lose(keras_pool("torch", 3), 2, "updated", (1, 9), *options)
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert (one == other).all()


def count(rank: int, world: int) -> int:
    """Lose rank 1 after its update, of a model without metrics."""
    strategy = SMDDPStrategy(elastic=True)
    keras.utils.clear_session()
    steps = []

    class Model(keras.Sequential):
        @property
        def metrics(self) -> list[Any]:
            return []

        def train_step(self, data: Any) -> Any:
            x, y = data
            loss = self.compute_loss(x, y, self(x))
            loss.backward()
            self.optimizer.apply([v.value.grad for v in self.trainable_weights])
            steps.append(loss)
            if rank == 1 and len(steps) == 4:
                die()
            return {"own": loss}

    with strategy.scope():
        model = Model([keras.layers.Dense(models.CLASSES)])
        model.compile(keras.optimizers.SGD(0.01), models.crossentropy())
    try:
        model.fit(**SOURCES["arrays"](), verbose=0)
        return int(model.optimizer.iterations)
    finally:
        strategy.close()


def test_no_step_is_taken_twice(keras_pool: Any) -> None:
    with keras_pool("torch", 2).start(count) as ranks:
        assert ranks[0].result() == -(-ROWS // BATCH)


def fail(rank: int, world: int) -> dict[str, Any]:
    def before(*place: Any) -> None:
        if (rank, *place[:-1]) == (0, "batch", 1, 2):
            raise ArithmeticError("a fault of the model")

    return train(before)


def test_an_error_of_the_program_ends_its_rank(keras_pool: Any) -> None:
    with keras_pool("torch", 3).start(fail) as ranks:
        with pytest.raises(ArithmeticError, match="a fault of the model"):
            ranks[0].result()
        results = [ranks[rank].result() for rank in (1, 2)]
    check(results, keras_pool("torch", 1).run(alone)[0])


def write(rank: int, world: int, folder: Path, victim: int) -> dict[str, Any]:
    def before(*place: Any) -> None:
        if (rank, *place[:-1]) == (victim, "batch", 1, 2):
            die()

    callbacks = [
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        keras.callbacks.BackupAndRestore(folder / "backup"),
    ]
    return train(before, callbacks=callbacks, verbose=2)


def test_another_rank_writes(keras_pool: Any, tmp_path: Path) -> None:
    """Files go on where the former rank 0 has left them."""
    with keras_pool("torch", 3).start(write, tmp_path, 0) as ranks:
        results = [ranks[rank].result() for rank in (1, 2)]
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
    wanted = results[0]["history"]["val_loss"]
    assert [float(row["val_loss"]) for row in rows] == pytest.approx(wanted)
    best = keras.models.load_model(tmp_path / "best.keras")
    loss = best.evaluate(*models.arrays(21), verbose=0)[0]
    assert loss == pytest.approx(min(wanted), abs=1e-4)
    assert not (tmp_path / "backup").exists()  # Keras deletes it at the end


class TornCheckpoint(keras.callbacks.ModelCheckpoint):
    """Rank 0 is lost while it saves the epoch that will be the best."""

    def __init__(self, path: Path, at: int, is_lost: Callable[[], bool]) -> None:
        super().__init__(path, monitor="best", mode="max", save_best_only=True)
        self._at, self._is_lost = at, is_lost

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._at and self._is_lost():
            Path(self.filepath).write_text("torn")
            die()
        super().on_epoch_end(epoch, {**logs, "best": float(epoch == self._at)})


def save(rank: int, world: int, folder: Path, at: int, first: str) -> dict[str, Any]:
    saves = TornCheckpoint(folder / "best.keras", at, lambda: rank == 0)
    logs = keras.callbacks.CSVLogger(folder / "log.csv")
    callbacks = [logs, saves] if first == "logs" else [saves, logs]
    return train(callbacks=[*callbacks, keras.callbacks.BackupAndRestore(folder / "backup")])


@pytest.mark.parametrize(("at", "first"), [(1, "logs"), (0, "saves"), (EPOCHS - 1, "saves")])
def test_a_rank_is_lost_while_it_saves(
    keras_pool: Any, tmp_path: Path, at: int, first: str
) -> None:
    """Another saves what that one has not; and only what is better."""
    with keras_pool("torch", 3).start(save, tmp_path, at, first) as ranks:
        results = [ranks[rank].result() for rank in (1, 2)]
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
    best = keras.models.load_model(tmp_path / "best.keras")
    assert best.optimizer.iterations == (at + 1) * -(-ROWS // BATCH)
    assert results[0]["history"] == results[1]["history"]


class Evaluating(keras.callbacks.Callback):
    """Evaluates other rows than `fit` validates on."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = models.arrays(40)
        logs["other_loss"] = self.model.evaluate(x, y, batch_size=8, verbose=0)[0]


def evaluate(rank: int, world: int) -> dict[str, Any]:
    def before(*place: Any) -> None:
        if (rank, world, *place[:-1]) == (1, 3, "batch", 1, 2):
            die()

    return train(before, callbacks=[Evaluating()])


def test_callbacks_evaluate(keras_pool: Any) -> None:
    with keras_pool("torch", 3).start(evaluate) as ranks:
        results = [ranks[rank].result() for rank in (0, 2)]
    expected = keras_pool("torch", 1).run(evaluate)[0]
    assert len(expected["history"]["other_loss"]) == EPOCHS
    check(results, expected)


def lead_or_join(rank: int, world: int, folder: Path, source: str, *options: Any) -> dict[str, Any]:
    """The last rank joins when rank 0 has come to the third step of the second epoch."""
    told = folder / "handles"
    starting = world - 1
    with pytest.MonkeyPatch.context() as patch:
        if rank < starting:
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                patch.setenv(name, str(starting))
        else:
            while not told.exists():
                time.sleep(0.01)
            patch.setenv("SDP_JOIN", told.read_text())

        def before(*place: Any) -> None:
            if (rank, *place[:-1]) == (0, "batch", 1, 2):
                job = place[-1]._context.job
                (folder / "new").write_text(",".join(job.handles))
                os.rename(folder / "new", told)
                while not job.waiting():
                    time.sleep(0.001)

        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
        slower = keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=0, min_delta=100.0)
        decay = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: slow_down())

        def slow_down() -> None:
            decay.model.optimizer.learning_rate = decay.model.optimizer.learning_rate * 0.99

        callbacks = [stop, slower, decay]
        return train(before, source, callbacks=callbacks, metrics=[PerClass()], **dict(options))


@pytest.mark.parametrize(
    ("backend", "source"),
    [
        ("torch", "arrays"),
        ("torch", "dataset"),
        ("torch", "loader"),
        ("tensorflow", "arrays"),
        ("tensorflow", "tf.data"),
        ("jax", "arrays"),
        ("jax", "dataset"),
    ],
)
def test_another_joins(keras_pool: Any, tmp_path: Path, backend: str, source: str) -> None:
    """It begins where the others are, with what their callbacks and optimizers know."""
    results = keras_pool(backend, 3).run(lead_or_join, tmp_path, source)
    assert results[2]["ranks"] == (2, 3)
    assert results[0]["epochs"] == [0, 1]  # stopped early, on all ranks alike
    for result in results[1:]:
        check([result], results[0])
    steps = len(results[0]["batches"])
    assert [result["rate"] for result in results] == pytest.approx([0.005 * 0.99**steps] * 3)


# ---- mistakes ------------------------------------------------------------------------------------


def misuse(rank: int, world: int) -> list[str]:
    texts = []
    for what in (
        {"steps_per_epoch": 2},
        {"validation_steps": 1},
        {"source": "generator"},
        {"compile": {"steps_per_execution": 2}},
        {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
    ):
        try:
            train(**what)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_mistakes(keras_pool: Any) -> None:
    texts = keras_pool("tensorflow", 1).run(misuse)[0]
    for text, wanted in zip(
        texts,
        (
            "steps_per_epoch=2",
            "validation_steps=1",
            "needs data with a known number of batches",
            "compile it with steps_per_execution=1",
            "accumulates gradients",
        ),
        strict=True,
    ):
        assert wanted in text


def test_the_program_of_the_page_runs_as_written(tmp_path: Path) -> None:
    environment = {**os.environ, **first_ranks.environment("torch")}
    done = launch_page(
        "elastic.md", tmp_path, ("--elastic", "1:2"), "fit_keras.py", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Epoch 5/5" in done.stdout
