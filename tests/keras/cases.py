"""What is trained in these tests: one case for each thing that a user may put into `fit`.

`CASES` is the specification. A case runs in a rank's process, with Keras on the backend that
KERAS_BACKEND names: by plain Keras in one process, or under the strategy. Both must give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.keras import models, sources
from tests.keras.case import Case, Result
from tests.keras.first_ranks import BACKENDS
from tests.keras.models import BATCH, arrays, crossentropy, dense

KERAS = tuple(int(part) for part in version("keras").split(".")[:2])


def other_than(backend: str, reason: str) -> dict[str, str]:
    """Why there is no such case but on one backend."""
    return {each: reason for each in BACKENDS if each != backend}


def run(rank: int, world: int, name: str) -> Result:
    """A case, by plain Keras or under the strategy."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(11 + 7 * rank)
    case = CASES[name]
    if world == 1:
        return case.train(case.compiled(world))
    from sdp_plugins.keras import SMDDPStrategy

    strategy = SMDDPStrategy()
    try:
        with strategy.scope():
            model = case.compiled(world)
        return case.train(model)
    finally:
        strategy.close()


def sgd(rate: float = 0.1, momentum: float = 0.5, **options: Any) -> Callable[[], Any]:
    return lambda: {"optimizer": keras.optimizers.SGD(rate, momentum=momentum, **options)}


def adam() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.Adam(0.01)}


def weights(rows: int) -> dict[str, Any]:
    return {"sample_weight": np.linspace(0.1, 2, rows).astype(np.float32)}


def validation(rows: int) -> dict[str, Any]:
    weight = np.linspace(0.5, 1, 11).astype(np.float32)
    return {"validation_data": (*arrays(11), weight), "validation_batch_size": 4}


def overflow(rows: int) -> dict[str, Any]:
    """A number that is too large for half precision once a layer has summed it up."""
    x, _ = arrays(rows)
    x[0] = 6e4
    return {"x": x}


def normalization(**options: Any) -> Any:
    return layers.BatchNormalization(momentum=0.8, **options)


def own_metrics(*metrics: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: {"metrics": [make() for make in metrics]}


def scores() -> list[Any]:
    return [
        keras.metrics.AUC(from_logits=True, num_thresholds=50),
        keras.metrics.R2Score(),
        keras.metrics.RootMeanSquaredError(),
    ]


BY_HAND = "in one process, too, torch 2.13 does not compile the steps of Keras before 3.12"
AS_ANY_ITERABLE = "on this backend like any other iterable, after an import of "
NEW_COMPILER = {"torch": BY_HAND} if KERAS < (3, 12) else {}
ONE_OPTIMIZER = {"jax": "Keras on JAX knows one optimizer of a model only"}
TENSORFLOW_DATA = other_than("tensorflow", AS_ANY_ITERABLE + "TensorFlow")

TRACED = ("tensorflow", "jax")
"""Where a case takes seconds. What is one code for all backends is a long test there."""

SOURCES = {
    "Arrays": Case(),
    "ShortLastBatch": Case(rows=21, versions=True),  # batches of 8, 8 and 5
    "LastBatchOfOne": Case(rows=17, on_three=BACKENDS),  # all ranks but one have no row in that
    "ArraysWithoutBatchSize": Case(batch_size=None, only_fits=True, long=TRACED),
    "Dataset": Case(
        rows=21,
        source=sources.dataset,
        only_fits=True,
        versions=True,
        unsupported=TENSORFLOW_DATA,
    ),
    "ShuffledDataset": Case(
        source=sources.shuffled_dataset,
        epochs=3,
        only_fits=True,
        unsupported={"jax": "as on torch, after an import of TensorFlow"},
    ),
    "UnknownLength": Case(rows=21, source=sources.unknown_length, unsupported=TENSORFLOW_DATA),
    "RepeatedDataset": Case(
        source=sources.repeated_dataset, only_fits=True, unsupported=TENSORFLOW_DATA
    ),
    "Loader": Case(
        rows=21,
        source=sources.loader,
        only_fits=True,
        versions=True,
        unsupported=other_than("torch", AS_ANY_ITERABLE + "torch"),
    ),
    "PyDataset": Case(source=sources.py_dataset, only_fits=True, versions=True),
    "Generator": Case(source=sources.generator, only_fits=True, long=TRACED),
}

ARGUMENTS_OF_FIT = {
    "ClassWeight": Case(
        rows=21,
        fit=lambda rows: {"class_weight": {0: 0.5, 1: 2.0, 2: 1.25}},
        only_fits=True,
        long=TRACED,
    ),
    "SampleWeight": Case(
        rows=21, compile=lambda: {"weighted_metrics": ["accuracy"]}, fit=weights, versions=True
    ),
    "ValidationSplit": Case(
        fit=lambda rows: {"validation_split": 0.3}, only_fits=True, long=TRACED
    ),
    "ValidationData": Case(fit=validation, versions=True),
    "StepsPerEpoch": Case(fit=lambda rows: {"steps_per_epoch": 2}, only_fits=True, long=TRACED),
    "Shuffled": Case(fit=lambda rows: {"shuffle": True}, only_fits=True, tolerance=None),
}

ARGUMENTS_OF_COMPILE = {
    "SeveralStepsPerExecution": Case(
        rows=21,
        compile=lambda: {"steps_per_execution": 2},
        versions=True,
        unsupported={"torch": "Keras has no steps_per_execution on torch"},
    ),
    "Eager": Case(rows=21, epochs=1, compile=lambda: {"run_eagerly": True}),
    # torch traces and differentiates ahead of time
    "Compiled": Case(
        rows=2 * BATCH,
        compiler="aot_eager",
        versions=True,
        long=("torch",),
        unsupported=NEW_COMPILER,
    ),
    # every shape takes torch's compiler half a minute
    "CompiledToMachineCode": Case(
        rows=2 * BATCH,
        compiler="inductor",
        long=("torch",),
        unsupported=NEW_COMPILER | other_than("torch", "on this backend Compiled is"),
    ),
    "SummedLoss": Case(
        rows=21,
        compile=lambda: sgd(0.01, 0.0)() | {"loss": crossentropy(reduction="sum")},
    ),
    "LossBySampleWeight": Case(
        rows=21,
        compile=lambda: {
            "loss": crossentropy(reduction="mean_with_sample_weight"),
            "weighted_metrics": ["accuracy"],
        },
        fit=weights,
        versions=True,
    ),
    "LossFunction": Case(rows=21, compile=lambda: {"loss": models.squares}, long=TRACED),
    "AreaUnderCurve": Case(
        rows=21,
        compile=lambda: {"loss": keras.losses.MeanSquaredError(), "metrics": scores()},
        data=models.one_hot,
        versions=True,
    ),
    "OwnMetrics": Case(
        rows=17,
        compile=lambda: {"metrics": [models.Peak(), models.spread, "accuracy"]},
        on_three=("torch",),
        versions=True,
    ),
    "OwnKindOfMean": Case(
        rows=17, compile=lambda: {"metrics": [models.RootMean(name="root")]}, long=TRACED
    ),
    "LossObjectAsMetric": Case(
        rows=21,
        compile=lambda: {"metrics": [crossentropy(name="object"), "accuracy"]},
        long=TRACED,
    ),
    "MetricOfOneNumber": Case(rows=21, build=models.TellsMetric, long=TRACED),
}

OPTIMIZERS = {
    "Clipnorm": Case(compile=sgd(clipnorm=0.05), only_fits=True),
    "GlobalClipnorm": Case(compile=sgd(global_clipnorm=0.05), only_fits=True),
    "Clipvalue": Case(compile=sgd(clipvalue=0.01), only_fits=True),
    "Accumulation": Case(rows=21, compile=sgd(gradient_accumulation_steps=2), only_fits=True),
    "AccumulationAndClipping": Case(
        rows=21,
        compile=sgd(gradient_accumulation_steps=3, global_clipnorm=0.05),
        only_fits=True,
        on_three=("torch",),
        versions=True,
    ),
    "MovingAverage": Case(
        compile=sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        only_fits=True,
        versions=True,
        unsupported={"jax": "in one process, too, Keras leaves deleted arrays in the model here"},
    ),
    "WeightDecay": Case(compile=sgd(weight_decay=0.01), only_fits=True, long=TRACED),
    "Adaptive": Case(compile=adam, only_fits=True),
    "OptimizerInDictionary": Case(
        build=partial(models.own_step, in_dictionary=True),
        compile=lambda: {"optimizer": "sgd"},
        unsupported=ONE_OPTIMIZER,
    ),
}

MODELS = {
    "Unbuilt": Case(rows=21, build=models.unbuilt, versions=True),
    "Subclassed": Case(rows=21, build=models.Subclassed),
    "TwoOutputs": Case(
        rows=21,
        build=models.two_outputs,
        compile=lambda: {
            "loss": {"kind": crossentropy(), "size": "mse"},
            "loss_weights": {"kind": 1.0, "size": 0.3},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
        data=models.two_targets,
        versions=True,
    ),
    "Regularized": Case(rows=21, build=models.regularized),
    "Embedding": Case(
        rows=21,
        build=lambda: models.embedding(layers.SimpleRNN(5)),
        data=models.tokens,
        versions=True,
    ),
    "MaskedTokens": Case(
        rows=21,
        build=models.embedding,
        compile=lambda: {"metrics": []},
        data=models.masked_tokens,
        on_three=("torch",),
        versions=True,
    ),
    "Frozen": Case(build=models.frozen, only_fits=True, long=TRACED),
    # sees this rank's rows only; its moving statistics are everyone's
    "Normalized": Case(
        build=lambda: dense(normalization()), tolerance=None, on_three=("torch",), versions=True
    ),
    # over all ranks' rows: 17 rows are one in the last batch, and uneven in the others
    "NormalizedTogether": Case(
        rows=17,
        build=lambda: dense(layers.Dense(6, use_bias=False), normalization(synchronized=True)),
        on_three=BACKENDS,
        unsupported=other_than("tensorflow", "Keras has no synchronized=True but on TensorFlow"),
    ),
    "Dropout": Case(build=lambda: dense(layers.Dropout(0.5)), only_fits=True, tolerance=None),
    "InfiniteMask": Case(rows=17, build=lambda: dense(models.Masking())),
    "OwnStep": Case(rows=21, build=models.own_step, versions=True),
    # a loss scale; an overflow is on one rank's rows only
    "MixedPrecision": Case(
        build=models.half_precision,
        compile=sgd(momentum=0.0),
        fit=overflow,
        tolerance=5e-3,
        versions=True,
    ),
}


def shared(compile: Callable[[], dict[str, Any]], tokens: bool = True) -> Case:
    """Of optimizers that clip or square, what counts is which slices are added up before."""
    build = partial(models.shared_ids, tokens)
    return Case(rows=21, build=build, compile=compile, data=models.tokens, only_fits=True)


SHARED_IDS = {
    "SharedIds": shared(sgd(momentum=0.0, clipnorm=0.02)),
    "SharedIdsGlobalClipnorm": shared(sgd(momentum=0.0, global_clipnorm=0.02)),
    "SharedIdsClipvalue": shared(sgd(momentum=0.0, clipvalue=0.002)),
    "SharedIdsAdaptive": shared(adam),
    "SharedIdsEagerly": shared(
        lambda: sgd(momentum=0.0, clipnorm=0.02)() | {"run_eagerly": True}, tokens=False
    ),
}


def one_row(build: Callable[[], Any], compile: Callable[[], dict[str, Any]] = dict) -> Case:
    """Batches of 3 and 2 rows leave one row on rank 0, whose tensors torch may have as views."""
    return Case(rows=5, batch_size=3, build=build, compile=compile, long=TRACED)


ONE_ROW = {
    "OneRow": one_row(models.views_of_one_row),
    "OneRowOwnStep": one_row(models.own_backward_pass),  # the same gradients after that
    "OneRowAccumulated": one_row(
        models.views_of_one_row, sgd(momentum=0.0, gradient_accumulation_steps=2)
    ),
}

CASES: dict[str, Case] = {
    **SOURCES,
    **ARGUMENTS_OF_FIT,
    **ARGUMENTS_OF_COMPILE,
    **OPTIMIZERS,
    **MODELS,
    **SHARED_IDS,
    **ONE_ROW,
}
