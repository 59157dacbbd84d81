"""What ranks do in tests of the strategy itself."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sdp_plugins.core import SdpError
from sdp_plugins.keras import SMDDPStrategy
from tests.keras.cases import BATCH, ROWS, arrays, crossentropy, dense


@contextmanager
def strategy() -> Iterator[SMDDPStrategy]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5 + int(os.environ.get("RANK", 0)))
    made = SMDDPStrategy()
    try:
        yield made
    finally:
        made.close()


def compiled(made: SMDDPStrategy, *more: Any, **options: Any) -> Any:
    with made.scope():
        model = dense(*more)
        options = {"optimizer": "sgd", "loss": crossentropy(), "metrics": ["accuracy"]} | options
        model.compile(**options)
    return model


def values(model: Any) -> list[Any]:
    return [ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


# ---- failures --------------------------------------------------------------------------------


def failure(rank: int, world: int, name: str) -> str:
    """The error that a misuse ends with on this rank; its text."""
    with strategy() as made:
        try:
            FAILURES[name](rank, made)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def other_layers(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        first = layers.Dense(3 + rank, name="first")
        model = keras.Sequential([keras.Input((6,)), first, layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(np.zeros((8, 6)), np.zeros((8, 3)), verbose=0)


def other_optimizer(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made, optimizer="adam" if rank == 1 else "sgd")
    model.fit(*arrays(), verbose=0)


def other_call(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    (model.fit if rank == 0 else model.evaluate)(*arrays(), verbose=0)


def alone(rank: int, made: SMDDPStrategy) -> None:
    """Only rank 0 evaluates; the other one is busy elsewhere until rank 0 has given up."""
    model = compiled(made)
    model.fit(*arrays(), verbose=0)
    gave_up = Path(tempfile.gettempdir(), f"gave-up-{os.environ['SDP_JOB_ID']}")
    if rank == 0:
        made.group.timeout_s = 1.5
        try:
            model.evaluate(*arrays(), verbose=0)
        finally:
            gave_up.touch()
    while not gave_up.exists():
        time.sleep(0.01)
    gave_up.unlink()


def stops_early(rank: int, made: SMDDPStrategy) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if rank == 1 and batch == 1:
                self.model.stop_training = True

    model = compiled(made)
    model.fit(*arrays(), batch_size=4, verbose=0, callbacks=[Stop()])


def stops_after_an_epoch(rank: int, made: SMDDPStrategy) -> None:
    """As a callback that only one rank has."""
    stop = keras.callbacks.EarlyStopping("loss", min_delta=9.0)
    callbacks = [stop] if rank == 0 else []
    compiled(made).fit(*arrays(), epochs=5, verbose=0, callbacks=callbacks)


def shorter_data(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()

    def batches() -> Iterator[Any]:
        for begin in range(0, 24 - 8 * rank, 8):
            yield x[begin : begin + 8], y[begin : begin + 8]

    compiled(made).fit(batches(), verbose=0)


class Assigns(keras.callbacks.Callback):
    """Changes one element of the last kernel, and on request the learning rate."""

    def __init__(self, rate: bool) -> None:
        super().__init__()
        self.rate = rate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and self.rate:
            self.model.optimizer.learning_rate = 0.5
        elif epoch == 1:
            kernel = self.model.layers[-1].kernel
            value = ops.convert_to_numpy(kernel).copy()
            value[-1, -1] += 1e-2 if keras.backend.backend() == "jax" else 1e-6  # JAX may round
            kernel.assign(value)


def assigns_on_rank_0(rank: int, made: SMDDPStrategy, rate: bool = False) -> None:
    callbacks = [Assigns(rate)] if rank == 0 else []
    compiled(made).fit(*arrays(), epochs=4, verbose=0, callbacks=callbacks)


def sets_rate_on_rank_0(rank: int, made: SMDDPStrategy) -> None:
    assigns_on_rank_0(rank, made, rate=True)


def unreduced(rank: int, made: SMDDPStrategy) -> None:
    compiled(made, loss=crossentropy(reduction=None)).fit(*arrays(), verbose=0)


def raises(rank: int, made: SMDDPStrategy) -> None:
    class Model(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            if rank == 1:
                raise ArithmeticError("the third layer is tired")
            return super().train_step(*args)

    with made.scope():
        model = Model([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", crossentropy())
    model.fit(*arrays(), verbose=0)


def compiled_outside(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = dense()
    model.compile("sgd", crossentropy())
    model.fit(*arrays(), verbose=0)


def scope_in_scope(rank: int, made: SMDDPStrategy) -> None:
    other = SMDDPStrategy(made.group)
    with made.scope(), other.scope():
        pass


def two_strategies(rank: int, made: SMDDPStrategy) -> None:
    model = compiled(made)
    with SMDDPStrategy(made.group).scope():
        model.compile("sgd", "mse")


def other_batches(rank: int, made: SMDDPStrategy) -> None:
    """A source that is shuffled without a seed."""
    x, y = arrays()
    order = np.random.default_rng(rank).permutation(len(x))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data: Any = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)
    else:

        class Source(keras.utils.PyDataset):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> Any:
                rows = order[BATCH * index : BATCH * index + BATCH]
                return x[rows], y[rows]

        data = Source()
    compiled(made).fit(data, verbose=0)


def ends_instead(rank: int, made: SMDDPStrategy) -> None:
    """As a script whose last lines are for rank 0 only."""
    model = compiled(made)
    model.fit(*arrays(), verbose=0)
    if rank == 0:
        model.evaluate(*arrays(), verbose=0)


def other_settings(rank: int, made: SMDDPStrategy) -> None:
    compiled(made, optimizer=keras.optimizers.SGD(momentum=0.5 + rank / 4)).fit(
        *arrays(), verbose=0
    )


def frozen_on_one_rank(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = dense()
        model.layers[0].trainable = rank == 0
        model.compile("sgd", crossentropy())
    model.fit(*arrays(), verbose=0)


def own_arrays(rank: int, made: SMDDPStrategy) -> None:
    """As where each rank is to read a part."""
    x, y = arrays()
    compiled(made).fit(x[rank::2], y[rank::2], verbose=0)


def bad_data_on_one_rank(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()
    compiled(made).fit(x, y, validation_data=(x, y[: len(y) - rank]), verbose=0)


def other_targets(rank: int, made: SMDDPStrategy) -> None:
    x, y = arrays()
    y[len(y) // 2] = rank
    compiled(made).fit(x, y, verbose=0)


def other_schedule(rank: int, made: SMDDPStrategy) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.5)
    compiled(made, optimizer=keras.optimizers.SGD(rate)).fit(*arrays(), verbose=0)


def stateful(rank: int, made: SMDDPStrategy) -> None:
    with made.scope():
        model = keras.Sequential(
            [keras.Input((4, 2), batch_size=8), layers.LSTM(3, stateful=True, name="keeps")]
        )
        model.compile("sgd", "mse")
    model.fit(np.zeros((8, 4, 2)), np.zeros((8, 3)), batch_size=8, verbose=0)


FAILURES = {
    function.__name__: function
    for function in (
        other_layers,
        other_optimizer,
        other_call,
        alone,
        stops_early,
        stops_after_an_epoch,
        shorter_data,
        assigns_on_rank_0,
        sets_rate_on_rank_0,
        unreduced,
        raises,
        other_batches,
        compiled_outside,
        scope_in_scope,
        two_strategies,
        ends_instead,
        other_settings,
        frozen_on_one_rank,
        own_arrays,
        bad_data_on_one_rank,
        other_targets,
        other_schedule,
        stateful,
    )
}


class Batches(keras.utils.PyDataset):
    """The arrays' batches; notes what it was asked for."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.x, self.y = arrays(rows)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


class Communicates(keras.callbacks.Callback):
    """Where a step may be under way."""

    def __init__(self, made: SMDDPStrategy) -> None:
        super().__init__()
        self.made = made

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        total = ops.convert_to_numpy(self.made.all_reduce(np.ones(3, np.float32), "sum"))
        assert total.tolist() == [2.0, 2.0, 2.0]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.predict(self.model_input, verbose=0)

    model_input = arrays()[0]


def between_steps(rank: int, world: int) -> list[Any]:
    """The host communicates while JAX's steps may be under way; wide, so that they take a while."""
    with strategy() as made:
        model = compiled(made, layers.Dense(1500), layers.Dense(1500))
        model.fit(
            Batches(),
            validation_data=Batches(),
            callbacks=[Communicates(made)],
            epochs=3,
            shuffle=False,
            verbose=0,
        )
        return [float(ops.convert_to_numpy(v).sum()) for v in model.trainable_variables]


def shuffled_batches(rank: int, world: int) -> list[list[int]]:
    """What a PyDataset was asked for in each epoch."""
    with strategy() as made:
        model, data, epochs = compiled(made), Batches(), []
        seen = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: epochs.append([*data.read])
        )
        model.fit(data, epochs=3, verbose=0, callbacks=[seen])
        return [epochs[0], *(b[len(a) :] for a, b in pairwise(epochs))]


def accumulates_over_two_fits(rank: int, world: int) -> list[Any]:
    """Three steps each, of which four make an update."""
    with strategy() as made:
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model = compiled(made, optimizer=optimizer)
        x, y = arrays(21)
        for _ in range(3):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return values(model)


def reads_what_rank_0_wrote(rank: int, world: int, folder: str) -> float:
    """As tutorials do: train with a checkpoint, then load the best weights on all ranks."""
    path = f"{folder}/best.weights.h5"
    with strategy() as made:
        model = compiled(made, layers.Dense(1500), layers.Dense(1500))
        for _ in range(3):
            saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
            model.fit(*arrays(), callbacks=[saves], verbose=0)
            model.load_weights(path)
        return float(model.evaluate(*arrays(), verbose=0)[0])


def loaded_on_one_rank(rank: int, world: int) -> list[float]:
    """Rank 0's weights are everyone's in evaluations, too."""
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), verbose=0)
        if rank == 0:
            model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        predicted = model.predict(arrays()[0], verbose=0)
        return [float(model.evaluate(*arrays(), verbose=0)[0]), float(np.abs(predicted).max())]


def same_scope_again(rank: int, world: int) -> None:
    with strategy() as made:
        with made.scope(), made.scope():
            model = dense()
            model.compile("sgd", crossentropy())
        model.fit(*arrays(), verbose=0)
        other = dense()
        other.compile("sgd", crossentropy())
        assert "fit" in vars(model)
        assert "fit" not in vars(other)


def compiled_again(rank: int, world: int) -> list[Any]:
    """A second compile, outside of the scope, keeps the model with its strategy."""
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), verbose=0)
        model.compile("adam", crossentropy())
        model.fit(*arrays(), shuffle=True, verbose=0)
        return values(model)


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sdp_plugins.keras")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def outside(rank: int, world: int) -> list[str]:
    """Compiled under a strategy, but in no scope; and after it."""
    with logged() as lines:
        with strategy() as made:
            compiled(made).compile("adam", "mse")  # knows its strategy
            model = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="alone")
            model.compile("sgd", "mse")
            model.predict(arrays()[0], verbose=0)
            assert not lines
            for _ in range(2):
                model.fit(arrays()[0], np.zeros((ROWS, 3)), verbose=0)
        other = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        other.compile("sgd", "mse")
        other.fit(arrays()[0], np.zeros((ROWS, 3)), verbose=0)
    return lines


def signs(rank: int, world: int) -> tuple[list[str], list[str]]:
    """What is logged, and the files that Keras' own warnings name."""
    import torch

    data, text = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays())), "will be ignored"
    with logged() as lines, strategy() as made, pytest.warns(match=text) as caught:
        compiled(made).fit(torch.utils.data.DataLoader(data, BATCH), verbose=0)
    return lines, [Path(each.filename).name for each in caught if text in str(each.message)]


def without_launcher(rank: int, world: int) -> tuple[int, list[str]]:
    with logged() as lines, strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), batch_size=BATCH, verbose=0)
        assert len(model.predict(arrays()[0], verbose=0)) == len(arrays()[0])
        return made.num_replicas_in_sync, lines


# ---- callbacks -------------------------------------------------------------------------------


def writes(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Files by callbacks; and what the epochs' logs say."""
    own = Path(folder) / str(rank)
    own.mkdir()
    with strategy() as made:
        model = compiled(made)
        history = model.fit(
            *arrays(),
            epochs=2,
            validation_data=arrays(11),
            verbose=2,
            callbacks=[
                keras.callbacks.ModelCheckpoint(str(own / "model.keras")),
                keras.callbacks.CSVLogger(str(own / "log.csv")),
            ],
        )
        model.save(own / "saved.keras")
        return {"files": sorted(p.name for p in own.iterdir()), "history": history.history}


def decides(rank: int, world: int) -> dict[str, Any]:
    """Callbacks that look at the logs."""
    with strategy() as made:
        model = compiled(made, optimizer=keras.optimizers.SGD(3.0))
        history = model.fit(
            *arrays(),
            epochs=8,
            batch_size=BATCH,
            validation_data=arrays(11),
            verbose=0,
            callbacks=[
                keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
                keras.callbacks.TerminateOnNaN(),
            ],
        )
        return {"history": history.history, "values": values(model)}


def poisoned(rank: int, world: int) -> int:
    """A NaN in one rank's rows ends training on all; how many batches that took."""
    x, y = arrays()
    x[9] = np.nan  # of the second batch of 8, rank 0's
    with strategy() as made:
        seen: list[int] = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(batch)
        )
        compiled(made).fit(
            x,
            y,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=[count, keras.callbacks.TerminateOnNaN()],
        )
        return len(seen)


def backs_up(rank: int, world: int, folder: str) -> list[Any]:
    """Training that was cut off after two of four epochs goes on, on all ranks."""
    x, y = arrays()

    class CutOff(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def backup() -> Any:  # rank 0's disk is not the others'
        path = Path(folder) / str(rank)
        return keras.callbacks.BackupAndRestore(str(path), delete_checkpoint=False)

    with strategy() as made, suppress(KeyboardInterrupt):
        compiled(made).fit(x, y, epochs=4, shuffle=False, verbose=0, callbacks=[backup(), CutOff()])
    with strategy() as made:
        model = compiled(made)
        history = model.fit(x, y, epochs=4, shuffle=False, verbose=0, callbacks=[backup()])
        return [history.epoch, values(model)]


def uninterrupted(rank: int, world: int) -> list[Any]:
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), epochs=4, shuffle=False, verbose=0)
        return [[2, 3], values(model)]


class Scale(layers.Layer):
    """Has a weight that is one number."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.scale


def accumulates_over_epochs(rank: int, world: int) -> list[Any]:
    with strategy() as made:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model = compiled(made, Scale(), optimizer=optimizer)
        model.fit(*arrays(3 * BATCH), batch_size=BATCH, epochs=3, verbose=0)
        return values(model)


# ---- for loops of one's own ------------------------------------------------------------------


def seen_rows(y_true: Any, y_pred: Any) -> Any:
    """A metric of the program's own, which gets all ranks' rows."""
    return ops.sum(ops.ones_like(ops.cast(y_true, "float32")))


def own_loop(rank: int, world: int) -> dict[str, Any]:
    with strategy() as made:
        numbers = ops.convert_to_tensor(np.arange(3, dtype=np.float32) + rank)
        square = ops.reshape(ops.arange(4, dtype="float32"), (2, 2))
        rows = ops.convert_to_tensor(np.full((rank + 1, 2), rank, np.float32))
        variable = keras.Variable(np.full(4, rank, np.float32))
        made.broadcast_variables([variable], root=world - 1)
        model = compiled(made, metrics=["accuracy", seen_rows])
        logs = [
            model.train_on_batch(*(part[:7] for part in arrays()), return_dict=True),
            model.test_on_batch(*arrays(), return_dict=True),
        ]
        return {
            "mean": ops.convert_to_numpy(made.all_reduce(numbers)),
            "sum": ops.convert_to_numpy(made.all_reduce(numbers, "sum")),
            "transposed": ops.convert_to_numpy(made.all_reduce(ops.transpose(square))),
            "rows": ops.convert_to_numpy(made.gather(rows)),
            "columns": ops.convert_to_numpy(made.gather(ops.transpose(rows), axis=1)),
            "variable": ops.convert_to_numpy(variable),
            "on_batch": json.loads(json.dumps(logs, default=float)),
            "predicted": np.asarray(model.predict_on_batch(arrays()[0][:7])).shape,
        }


def transport(rank: int, world: int, native_ops: str) -> str:
    """Which one is used; a step by it."""
    with without_native_ops() if native_ops == "0" else nullcontext(), strategy() as made:
        model = compiled(made)
        model.fit(*arrays(17), batch_size=BATCH, verbose=0)
        return "copies" if made._context.backend._collectives._endpoint is None else "native"


@contextmanager
def without_native_ops() -> Iterator[None]:
    """As in a process that has loaded none, and must not."""
    if keras.backend.backend() == "jax":
        from sdp_plugins.jax import collectives as module

        name = "register"
    else:
        from sdp_plugins.tensorflow import operations as module

        name = "all_reduce"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDP_NATIVE_OPS", "0")
        patch.setattr(module, name, getattr(module, name).__wrapped__)
        yield


def xla_undone(rank: int, world: int) -> tuple[bool, list[str], float]:
    """A model that was to be compiled by XLA."""
    with logged() as lines, strategy() as made:
        model = compiled(made, jit_compile=True)
        history = model.fit(*arrays(), batch_size=BATCH, shuffle=False, verbose=0)
        model.evaluate(*arrays(), verbose=0)
        return model.jit_compile, lines, history.history["loss"][0]


def end_of_group(rank: int, world: int) -> str:
    """A compiled step that outlives its strategy."""
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), verbose=0)
    try:
        model.fit(*arrays(), verbose=0)
    except SdpError as error:
        return str(error)
    return "none"
