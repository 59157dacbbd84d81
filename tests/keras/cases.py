"""What is trained in these tests: one case for each thing that a user may put into ``fit``.

A case runs in a rank's process, with Keras on the backend that KERAS_BACKEND names: by plain Keras
in one process, or under the strategy. Both must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import keras
import numpy as np
from keras import layers, ops

ROWS, FEATURES, CLASSES = 24, 6, 3
BATCH = 8

Result = dict[str, Any]


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and which class each is of."""
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(axis=1).astype(np.int32)
    return x, y


def dense(*more: Any) -> Any:
    """A small classifier."""
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, "tanh"), *more, layers.Dense(CLASSES)]
    )


def crossentropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Case:
    """One case; subclasses change what they are about."""

    rows = ROWS
    batch_size: int | None = BATCH
    epochs = 2
    on_ranks = False
    only_fits = False  # as `evaluate` and `predict` do not meet what the case is about

    def build(self) -> Any:
        return dense()

    def compile_options(self) -> dict[str, Any]:
        return {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
            "loss": crossentropy(),
            "metrics": ["accuracy"],
        }

    def fit_options(self) -> dict[str, Any]:
        x, y = arrays(self.rows)
        return {"x": x, "y": y, "batch_size": self.batch_size, "epochs": self.epochs}

    def evaluate_options(self) -> dict[str, Any]:
        x, y = arrays(self.rows)
        return {"x": x, "y": y, "batch_size": BATCH}

    def predict_options(self) -> dict[str, Any]:
        return {"x": arrays(self.rows)[0], "batch_size": BATCH}

    def callbacks(self) -> list[Any]:
        return []

    def run(self, model: Any) -> Result:
        batches = Batches()
        history = model.fit(
            **{"shuffle": False} | self.fit_options(),
            verbose=0,
            callbacks=[*self.callbacks(), batches],
        )
        trained = {"history": history.history, "batches": batches.logs}
        if self.only_fits:
            return trained
        return trained | {
            "evaluation": model.evaluate(**self.evaluate_options(), verbose=0, return_dict=True),
            "prediction": keras.tree.map_structure(
                np.asarray, model.predict(**self.predict_options(), verbose=0)
            ),
        }


class Batches(keras.callbacks.Callback):
    """The logs after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append({name: float(value) for name, value in logs.items()})


def run(rank: int, world: int, name: str) -> Result:
    """A case, by plain Keras or under the strategy; and the variables that it ends with."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(11 + 7 * rank)
    case = CASES[name]()
    if world == 1:
        model = case.build()
        model.compile(**case.compile_options())
        return finish(case, model)
    from sdp_plugins.keras import SMDDPStrategy

    case.on_ranks = True
    strategy = SMDDPStrategy()
    try:
        with strategy.scope():
            model = case.build()
            model.compile(**case.compile_options())
        return finish(case, model)
    finally:
        strategy.close()


def finish(case: Case, model: Any) -> Result:
    result = case.run(model)
    seeds = {
        id(generator.state)
        for layer in model._flatten_layers()
        for generator in layer._seed_generators
    }
    variables = [
        variable
        for variable in [*model.variables, *model.optimizer.variables]
        if id(variable) not in seeds
    ]
    result["variables"] = {v.path: ops.convert_to_numpy(v) for v in variables}
    return result


# ---- sources of data -------------------------------------------------------------------------


class Arrays(Case):
    pass


class ShortLastBatch(Case):
    rows = 21  # batches of 8, 8 and 5


class LastBatchOfOne(Case):
    rows = 17  # all ranks but one have no row in the last step


class ArraysWithoutBatchSize(Case):
    only_fits = True
    batch_size = None


class Dataset(Case):
    rows = 21
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(arrays(self.rows)).batch(BATCH)
        return {"x": data, "epochs": self.epochs}


class ShuffledDataset(Case):
    """In another order at every iteration, of which plain Keras takes some more than epochs."""

    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        import tensorflow as tf

        tf.random.set_seed(1)  # counts beside the other
        data = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=3).batch(BATCH)
        return {"x": data, "validation_data": data, "epochs": 3}


class UnknownLength(Case):
    """Ends when it ends."""

    rows = 21

    def fit_options(self) -> dict[str, Any]:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(arrays(self.rows))
        data = data.filter(lambda *_: True).batch(BATCH)
        return {"x": data, "validation_data": data, "epochs": self.epochs}


class RepeatedDataset(Case):
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(arrays()).repeat().batch(5)
        return {"x": data, "epochs": self.epochs, "steps_per_epoch": 4}


class Loader(Case):
    rows = 21
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        import torch

        x, y = map(torch.from_numpy, arrays(self.rows))
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH)
        return {"x": data, "epochs": self.epochs}


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return tuple(part[BATCH * index : BATCH * index + BATCH] for part in arrays(21))


class PyDataset(Case):
    rows = 21
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        return {"x": Sequence(), "epochs": self.epochs}


class Generator(Case):
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        def batches() -> Iterator[Any]:
            x, y = arrays(21)
            while True:
                for begin in range(0, 21, BATCH):
                    yield x[begin : begin + BATCH], y[begin : begin + BATCH]

        return {"x": batches(), "epochs": self.epochs, "steps_per_epoch": 3}


# ---- arguments of fit ------------------------------------------------------------------------


class ClassWeight(Case):
    rows = 21
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"class_weight": {0: 0.5, 1: 2.0, 2: 1.25}}


class SampleWeight(Case):
    rows = 21

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"weighted_metrics": ["accuracy"]}

    def fit_options(self) -> dict[str, Any]:
        weight = np.linspace(0.1, 2, self.rows).astype(np.float32)
        return super().fit_options() | {"sample_weight": weight}


class ValidationSplit(Case):
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"validation_split": 0.3}


class ValidationData(Case):
    def fit_options(self) -> dict[str, Any]:
        x, y = arrays(11)
        return super().fit_options() | {
            "validation_data": (x, y, np.linspace(0.5, 1, 11).astype(np.float32)),
            "validation_batch_size": 4,
        }


class StepsPerEpoch(Case):
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"steps_per_epoch": 2}


class Shuffled(Case):
    only_fits = True

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"shuffle": True}


# ---- arguments of compile --------------------------------------------------------------------


class Options(Case):
    """A case that differs in options of ``compile`` only."""

    rows = 21
    options: ClassVar[dict[str, Any]] = {}

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | self.options


class SeveralStepsPerExecution(Options):
    options: ClassVar = {"steps_per_execution": 2}


class Eager(Options):
    epochs = 1
    options: ClassVar = {"run_eagerly": True}


class Compiled(Options):
    """On torch one process does without; its ranks trace and differentiate ahead of time."""

    compiler = "aot_eager"

    rows = 2 * BATCH

    def compile_options(self) -> dict[str, Any]:
        by_hand = keras.backend.backend() == "torch" and not self.on_ranks
        return super().compile_options() | {"jit_compile": not by_hand}

    def run(self, model: Any) -> Result:
        if keras.backend.backend() != "torch":
            return super().run(model)
        import torch

        with mock.patch.object(torch, "compile", partial(torch.compile, backend=self.compiler)):
            history = model.fit(**self.fit_options(), shuffle=False, verbose=0)
        return {"history": history.history}


class CompiledToMachineCode(Compiled):
    """Every shape takes torch's compiler half a minute."""

    compiler = "inductor"


class Optimizer(Case):
    """A case that differs in its optimizer only."""

    only_fits = True
    options: ClassVar[dict[str, Any]] = {}

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.5, **self.options)
        }


class Clipnorm(Optimizer):
    options: ClassVar = {"clipnorm": 0.05}


class GlobalClipnorm(Optimizer):
    options: ClassVar = {"global_clipnorm": 0.05}


class Clipvalue(Optimizer):
    options: ClassVar = {"clipvalue": 0.01}


class Accumulation(Optimizer):
    rows = 21
    options: ClassVar = {"gradient_accumulation_steps": 2}


class AccumulationAndClipping(Optimizer):
    rows = 21
    options: ClassVar = {"gradient_accumulation_steps": 3, "global_clipnorm": 0.05}


class MovingAverage(Optimizer):
    options: ClassVar = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}


class WeightDecay(Optimizer):
    options: ClassVar = {"weight_decay": 0.01}


class Adaptive(Optimizer):
    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"optimizer": keras.optimizers.Adam(0.01)}


class SummedLoss(Case):
    rows = 21

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "optimizer": keras.optimizers.SGD(0.01),
            "loss": crossentropy(reduction="sum"),
        }


class LossBySampleWeight(SampleWeight):
    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "loss": crossentropy(reduction="mean_with_sample_weight")
        }


class LossFunction(Case):
    rows = 21

    def compile_options(self) -> dict[str, Any]:
        def loss(y_true: Any, y_pred: Any) -> Any:
            return ops.mean(ops.square(ops.one_hot(y_true, CLASSES) - y_pred), axis=-1)

        return super().compile_options() | {"loss": loss}


class AreaUnderCurve(Case):
    rows = 21

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "loss": keras.losses.MeanSquaredError(),
            "metrics": [
                keras.metrics.AUC(from_logits=True, num_thresholds=50),
                keras.metrics.R2Score(),
                keras.metrics.RootMeanSquaredError(),
            ],
        }

    def fit_options(self) -> dict[str, Any]:
        options = super().fit_options()
        return options | {"y": np.eye(CLASSES, dtype=np.float32)[options["y"]]}

    def evaluate_options(self) -> dict[str, Any]:
        options = super().evaluate_options()
        return options | {"y": np.eye(CLASSES, dtype=np.float32)[options["y"]]}


class Peak(keras.metrics.Metric):
    """The largest prediction so far: its state does not add up."""

    def __init__(self, name: str = "peak") -> None:
        super().__init__(name=name)
        self.peak = self.add_variable((), "zeros", name="peak")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.peak.assign(ops.maximum(self.peak, ops.max(y_pred)))

    def result(self) -> Any:
        return self.peak + 0


class OwnMetrics(Case):
    rows = 17

    def compile_options(self) -> dict[str, Any]:
        def spread(y_true: Any, y_pred: Any) -> Any:
            return ops.max(y_pred) - ops.min(y_pred)

        return super().compile_options() | {"metrics": [Peak(), spread, "accuracy"]}


class RootMean(keras.metrics.Mean):
    """What it makes of a batch is not the mean of what it makes of the parts."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.sqrt(ops.mean(ops.square(y_pred))))


class OwnKindOfMean(Case):
    rows = 17

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"metrics": [RootMean(name="root")]}


class LossObjectAsMetric(Case):
    rows = 21

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"metrics": [crossentropy(name="object"), "accuracy"]}


class Latest(keras.metrics.Metric):
    """Keeps the last number that it was told."""

    def __init__(self) -> None:
        super().__init__(name="latest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, value: Any) -> None:
        self.value.assign(value)

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)


class MetricOfOneNumber(Case):
    """A metric of the program's own is told of the loss."""

    rows = 21

    def build(self) -> Any:
        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner = dense()
                self.latest = Latest()

            def call(self, x: Any) -> Any:
                return self.inner(x)

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(*args, **kwargs)
                self.latest.update_state(loss)
                return loss

        return Model()


# ---- models ----------------------------------------------------------------------------------


class Unbuilt(Case):
    rows = 21

    def build(self) -> Any:
        return keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(CLASSES)])


class Subclassed(Case):
    rows = 21

    def build(self) -> Any:
        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.outer = layers.Dense(8, "tanh"), layers.Dense(CLASSES)

            def call(self, x: Any) -> Any:
                return self.outer(self.inner(x))

        return Model()


class TwoOutputs(Case):
    rows = 21

    def build(self) -> Any:
        x = keras.Input((FEATURES,), name="x")
        h = layers.Dense(8, "tanh")(x)
        return keras.Model(
            {"x": x},
            {
                "kind": layers.Dense(CLASSES, name="kind")(h),
                "size": layers.Dense(1, name="size")(h),
            },
        )

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "loss": {"kind": crossentropy(), "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        }

    def _data(self) -> dict[str, Any]:
        x, y = arrays(self.rows)
        return {"x": {"x": x}, "y": {"kind": y, "size": x[:, :1]}}

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | self._data()

    def evaluate_options(self) -> dict[str, Any]:
        return super().evaluate_options() | self._data()

    def predict_options(self) -> dict[str, Any]:
        return super().predict_options() | {"x": self._data()["x"]}


class Regularized(Case):
    rows = 21

    def build(self) -> Any:
        return dense(
            layers.Dense(
                5, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.1)
            )
        )


class Embedding(Case):
    rows = 21

    def build(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.SimpleRNN(5),
                layers.Dense(CLASSES),
            ]
        )

    def _x(self) -> Any:
        return np.random.default_rng(5).integers(0, 20, (self.rows, FEATURES)).astype(np.int32)

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"x": self._x()}

    def evaluate_options(self) -> dict[str, Any]:
        return super().evaluate_options() | {"x": self._x()}

    def predict_options(self) -> dict[str, Any]:
        return super().predict_options() | {"x": self._x()}


class Positions(layers.Layer):
    """Embeds tokens and their positions by one table: ids of the rows, and ids of all rows."""

    def __init__(self, tokens: bool = True) -> None:
        super().__init__()
        self.table = layers.Embedding(20, 4)
        self.tokens = tokens

    def build(self, shape: Any) -> None:
        self.table.build(shape)

    def call(self, x: Any) -> Any:
        positions = self.table(ops.arange(ops.shape(x)[1]))
        return positions + (self.table(x) if self.tokens else ops.cast(x[..., None], "float32"))


class SharedIds(Embedding):
    """Of optimizers that clip or square, what counts is which slices are added up before."""

    only_fits = True
    tokens = True
    optimizer = staticmethod(lambda: keras.optimizers.SGD(0.1, clipnorm=0.02))

    def build(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,), dtype="int32"),
                Positions(self.tokens),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"optimizer": self.optimizer()}


class SharedIdsGlobalClipnorm(SharedIds):
    optimizer = staticmethod(lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.02))


class SharedIdsClipvalue(SharedIds):
    optimizer = staticmethod(lambda: keras.optimizers.SGD(0.1, clipvalue=0.002))


class SharedIdsAdaptive(SharedIds):
    optimizer = staticmethod(lambda: keras.optimizers.Adam(0.01))


class SharedIdsEagerly(SharedIds):
    tokens = False

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"run_eagerly": True}


class MaskedTokens(Embedding):
    """A loss per token, of which a mask leaves a different share on every rank."""

    def build(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((FEATURES,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.Dense(CLASSES),
            ]
        )

    def _x(self) -> Any:
        x = super()._x()
        for row in range(len(x)):
            x[row, : row % FEATURES] = 0
        return x

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"metrics": []}

    def fit_options(self) -> dict[str, Any]:
        return super().fit_options() | {"y": self._x() % CLASSES}

    def evaluate_options(self) -> dict[str, Any]:
        return super().evaluate_options() | {"y": self._x() % CLASSES}


class Position(layers.Layer):
    """Adds a vector by a view: of one row its gradient is a view of the one that is passed on."""

    def __init__(self, by_reshape: bool = False) -> None:
        super().__init__()
        self.by_reshape = by_reshape

    def build(self, shape: Any) -> None:
        self.position = self.add_weight(shape=(shape[-1],), initializer="ones", name="position")

    def call(self, x: Any) -> Any:
        if self.by_reshape:
            return x + ops.reshape(self.position, (1, -1))
        return x + ops.expand_dims(self.position, 0)


class OneRow(Case):
    """Batches of 3 and 2 rows leave one row on rank 0."""

    rows = 5
    batch_size = 3

    def build(self) -> Any:
        return dense(
            Position(), layers.Dense(8), layers.GroupNormalization(4), Position(by_reshape=True)
        )


class OneRowOwnStep(OneRow):
    """The same gradients after a backward pass of the program's own."""

    def build(self) -> Any:
        class Model(keras.Sequential):
            def train_step(self, *args: Any) -> Any:
                return super().train_step(*args)

        return Model([super().build()])


class OneRowAccumulated(OneRow):
    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {
            "optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        }


class Frozen(Case):
    only_fits = True

    def build(self) -> Any:
        model = dense(layers.Dense(4, name="frozen"))
        model.get_layer("frozen").trainable = False
        return model


class Normalized(Case):
    """BatchNormalization sees this rank's rows only; its moving statistics are everyone's."""

    def build(self) -> Any:
        return dense(layers.BatchNormalization(momentum=0.8))


class NormalizedTogether(Case):
    """Over all ranks' rows: 17 rows are one in the last batch, and uneven in the others."""

    rows = 17

    def build(self) -> Any:
        more = layers.BatchNormalization(momentum=0.8, synchronized=True)
        return dense(layers.Dense(6, use_bias=False), more)


class Dropout(Case):
    only_fits = True

    def build(self) -> Any:
        return dense(layers.Dropout(0.5))


class Masking(layers.Layer):
    """Adds a state of its own, which nobody changes and of which there are no differences."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(
            shape=(shape[-1],),
            trainable=False,
            initializer=lambda shape, dtype=None: ops.convert_to_tensor(
                [0.0] * (shape[0] - 1) + [-np.inf], dtype
            ),
        )

    def call(self, x: Any) -> Any:
        return ops.relu(x + self.mask)


class InfiniteMask(Case):
    rows = 17

    def build(self) -> Any:
        return dense(Masking())


class OptimizerInDictionary(Case):
    """An optimizer that is no attribute of the model."""

    rows = 24

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"optimizer": "sgd"}

    def build(self) -> Any:
        return OWN_STEPS[keras.backend.backend()](in_dictionary=True)


class OwnStep(Case):
    """The train_step of the guides, with a metric of its own and a value that none keeps."""

    rows = 21

    def build(self) -> Any:
        return OWN_STEPS[keras.backend.backend()]()


class MixedPrecision(Case):
    """Half precision and a loss scale; an overflow is on one rank's rows only."""

    rows = 24

    def build(self) -> Any:
        keras.config.set_dtype_policy("mixed_float16")
        return dense()

    def compile_options(self) -> dict[str, Any]:
        return super().compile_options() | {"optimizer": keras.optimizers.SGD(0.1)}

    def fit_options(self) -> dict[str, Any]:
        options = super().fit_options()
        options["x"][0] = 6e4  # too large once a layer has summed it up
        return options


def stateful_step(take_gradients: Callable[..., Any], in_dictionary: bool) -> Any:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = layers.Dense(8, "tanh"), layers.Dense(CLASSES)
            self.own_loss = keras.metrics.Mean(name="own_loss")
            self.own = {"a": keras.optimizers.SGD(0.1)} if in_dictionary else {}

        def call(self, x: Any) -> Any:
            return self.outer(self.inner(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            loss, gradients = take_gradients(self, x, y)
            optimizer = self.own["a"] if self.own else self.optimizer
            optimizer.apply(gradients, self.trainable_variables)
            self.own_loss.update_state(loss, sample_weight=ops.shape(x)[0])
            mean = self.own_loss.result()
            return {"own_loss": mean, "by_another_name": mean, "raw": loss}

        @property
        def metrics(self) -> Any:
            return [self.own_loss]

        def test_step(self, data: Any) -> Any:
            x, y = data
            self.own_loss.update_state(
                self.compute_loss(x, y, self(x)), sample_weight=ops.shape(x)[0]
            )
            return {"own_loss": self.own_loss.result()}

    return Model()


def tensorflow_step(in_dictionary: bool = False) -> Any:
    def take(model: Any, x: Any, y: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return stateful_step(take, in_dictionary)


def torch_step(in_dictionary: bool = False) -> Any:
    def take(model: Any, x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = model.compute_loss(x, y, model(x, training=True))
        loss.backward()
        return loss.detach(), [variable.value.grad for variable in model.trainable_variables]

    return stateful_step(take, in_dictionary)


def jax_step() -> Any:
    import jax

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = layers.Dense(8, "tanh"), layers.Dense(CLASSES)

        def call(self, x: Any) -> Any:
            return self.outer(self.inner(x))

        def train_step(self, state: Any, data: Any) -> Any:
            trainable, others, optimizer, metrics = state
            x, y = data

            def loss_of(trainable: Any) -> Any:
                y_pred, updated = self.stateless_call(trainable, others, x)
                return self.compute_loss(x, y, y_pred), updated

            (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
            return {"raw": loss}, (trainable, updated, optimizer, metrics)

    return Model()


OWN_STEPS = {"tensorflow": tensorflow_step, "torch": torch_step, "jax": jax_step}

CASES: dict[str, type[Case]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Case)
}
for _base in (Case, Options, Optimizer):
    CASES.pop(_base.__name__)
