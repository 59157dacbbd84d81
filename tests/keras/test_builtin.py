"""Every loss and every metric of Keras means what it means in one process.

One model has an output for each. `LOSSES` and `METRICS` are the specification: a test fails if
Keras has one that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, ops

from tests.keras.first_ranks import BACKENDS, on_ranks

ROWS, BATCH, FEATURES = 9, 5, 4
CLASS = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], np.int32)  # pairs of each class in each batch

Make = Callable[[], Any]

LOSSES: dict[str, tuple[str, Make]] = {
    "BinaryCrossentropy": ("binary", losses.BinaryCrossentropy),
    "BinaryFocalCrossentropy": ("binary", losses.BinaryFocalCrossentropy),
    "CTC": ("labels", losses.CTC),
    "CategoricalCrossentropy": ("onehot", losses.CategoricalCrossentropy),
    "CategoricalFocalCrossentropy": ("onehot", losses.CategoricalFocalCrossentropy),
    "CategoricalHinge": ("onehot", losses.CategoricalHinge),
    "Circle": ("class", partial(losses.Circle, gamma=4)),
    "CosineSimilarity": ("real", losses.CosineSimilarity),
    "Dice": ("binary", losses.Dice),
    "Hinge": ("signs", losses.Hinge),
    "Huber": ("real", losses.Huber),
    "KLDivergence": ("onehot", losses.KLDivergence),
    "LogCosh": ("real", losses.LogCosh),
    "MeanAbsoluteError": ("real", losses.MeanAbsoluteError),
    "MeanAbsolutePercentageError": ("real", losses.MeanAbsolutePercentageError),
    "MeanSquaredError": ("real", losses.MeanSquaredError),
    "MeanSquaredLogarithmicError": ("real", losses.MeanSquaredLogarithmicError),
    "Poisson": ("real", losses.Poisson),
    "SparseCategoricalCrossentropy": ("index", losses.SparseCategoricalCrossentropy),
    "SquaredHinge": ("signs", losses.SquaredHinge),
    "Tversky": ("binary", losses.Tversky),
    # the same with options, and as functions
    "Dice_of_rows": ("binary", partial(losses.Dice, axis=(1,))),
    "Dice_of_columns": ("binary", partial(losses.Dice, axis=(0,))),
    "Dice_function": ("binary", lambda: losses.dice),
    "Dice_sum": ("binary", partial(losses.Dice, reduction="sum")),
    "Tversky_of_columns": ("binary", partial(losses.Tversky, alpha=0.3, beta=0.7, axis=0)),
    "Cosine_of_columns": ("real", partial(losses.CosineSimilarity, axis=0)),
    "Cosine_from_behind": ("real", partial(losses.CosineSimilarity, axis=-2)),
    "Circle_sum": ("class", partial(losses.Circle, gamma=4, reduction="sum")),
    "Squared_sum": ("real", partial(losses.MeanSquaredError, reduction="sum")),
    "Squared_by_weight": (
        "real",
        partial(losses.MeanSquaredError, reduction="mean_with_sample_weight"),
    ),
    "Kullback_of_numbers": ("numbers", losses.KLDivergence),
    "Squared_of_numbers": ("numbers", losses.MeanSquaredError),
}
METRICS: dict[str, tuple[str, Make]] = {
    "AUC": ("binary", partial(metrics.AUC, num_thresholds=20)),
    "Accuracy": ("binary", metrics.Accuracy),
    "BinaryAccuracy": ("binary", metrics.BinaryAccuracy),
    "BinaryCrossentropy": ("binary", metrics.BinaryCrossentropy),
    "BinaryIoU": ("binary", metrics.BinaryIoU),
    "CategoricalAccuracy": ("onehot", metrics.CategoricalAccuracy),
    "CategoricalCrossentropy": ("onehot", metrics.CategoricalCrossentropy),
    "CategoricalHinge": ("onehot", metrics.CategoricalHinge),
    "CosineSimilarity": ("real", metrics.CosineSimilarity),
    "F1Score": ("onehot", metrics.F1Score),
    "FBetaScore": ("onehot", partial(metrics.FBetaScore, "micro", 2.0)),
    "FalseNegatives": ("binary", metrics.FalseNegatives),
    "FalsePositives": ("binary", metrics.FalsePositives),
    "Hinge": ("signs", metrics.Hinge),
    "IoU": ("index", partial(metrics.IoU, 3, [0, 2], sparse_y_pred=False)),
    "KLDivergence": ("onehot", metrics.KLDivergence),
    "LogCoshError": ("real", metrics.LogCoshError),
    "MeanAbsoluteError": ("real", metrics.MeanAbsoluteError),
    "MeanAbsolutePercentageError": ("real", metrics.MeanAbsolutePercentageError),
    "MeanIoU": ("index", partial(metrics.MeanIoU, 3, sparse_y_pred=False)),
    "MeanMetricWrapper": ("real", partial(metrics.MeanMetricWrapper, losses.huber, "huber")),
    "MeanSquaredError": ("real", metrics.MeanSquaredError),
    "MeanSquaredLogarithmicError": ("real", metrics.MeanSquaredLogarithmicError),
    "OneHotIoU": ("onehot", partial(metrics.OneHotIoU, 3, [0, 1])),
    "OneHotMeanIoU": ("onehot", partial(metrics.OneHotMeanIoU, 3)),
    "Poisson": ("real", metrics.Poisson),
    "Precision": ("binary", metrics.Precision),
    "PrecisionAtRecall": ("binary", partial(metrics.PrecisionAtRecall, 0.5, 20)),
    "R2Score": ("real", metrics.R2Score),
    "Recall": ("binary", metrics.Recall),
    "RecallAtPrecision": ("binary", partial(metrics.RecallAtPrecision, 0.5, 20)),
    "RootMeanSquaredError": ("real", metrics.RootMeanSquaredError),
    "SensitivityAtSpecificity": ("binary", partial(metrics.SensitivityAtSpecificity, 0.5, 20)),
    "SparseCategoricalAccuracy": ("index", metrics.SparseCategoricalAccuracy),
    "SparseCategoricalCrossentropy": ("index", metrics.SparseCategoricalCrossentropy),
    "SparseTopKCategoricalAccuracy": ("index", partial(metrics.SparseTopKCategoricalAccuracy, 2)),
    "SpecificityAtSensitivity": ("binary", partial(metrics.SpecificityAtSensitivity, 0.5, 20)),
    "SquaredHinge": ("signs", metrics.SquaredHinge),
    "TopKCategoricalAccuracy": ("onehot", partial(metrics.TopKCategoricalAccuracy, 2)),
    "TrueNegatives": ("binary", metrics.TrueNegatives),
    "TruePositives": ("binary", metrics.TruePositives),
    # of the whole batch
    "dice": ("binary", partial(metrics.MeanMetricWrapper, losses.dice, "dice")),
    "tversky": ("binary", partial(metrics.MeanMetricWrapper, losses.tversky, "tversky")),
    "cosine_of_columns": ("real", partial(metrics.CosineSimilarity, "cosine_columns", axis=0)),
    # loss objects
    "Dice_object": ("binary", partial(metrics.MeanMetricWrapper, losses.Dice(), "Dice_object")),
    "Huber_object": ("real", partial(metrics.MeanMetricWrapper, losses.Huber(), "Huber_object")),
}
TOLD_NUMBERS = {"Mean", "Sum"}
"""Metrics that are given values: see `MetricOfOneNumber` in `cases.py`."""
WITHOUT_WEIGHTS = {
    "BinaryIoU",
    "ConcordanceCorrelation_of_columns",
    "Cosine_from_behind",
    "Cosine_of_columns",
    "Dice_of_columns",
    "PearsonCorrelation_of_columns",
    "Tversky_of_columns",
    "cosine_of_columns",
    "Dice_object",
    "Huber_object",
    "dice",
    "tversky",
}
"""In one process, too, these take no weight for each row."""

if hasattr(losses, "CategoricalGeneralizedCrossEntropy"):
    _cross_entropy = losses.CategoricalGeneralizedCrossEntropy
    LOSSES["CategoricalGeneralizedCrossEntropy"] = ("index", _cross_entropy)
for _name in ("ConcordanceCorrelation", "PearsonCorrelation"):
    if _kind := getattr(metrics, _name, None):
        METRICS[_name] = ("real", _kind)
        METRICS[f"{_name}_of_columns"] = ("real", partial(_kind, f"{_name}_columns", axis=0))


@pytest.mark.versions
@on_ranks(1)
def test_the_tables_have_all(rank: int, world: int) -> None:
    kinds = [
        (losses, losses.Loss, LOSSES.keys()),
        (metrics, metrics.Metric, METRICS.keys() | TOLD_NUMBERS),
    ]
    missing = [
        name
        for module, base, table in kinds
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
        if name not in table
    ]
    assert missing == []


def _targets() -> dict[str, Any]:
    random = np.random.default_rng(4)
    binary = random.integers(0, 2, (ROWS, 3)).astype(np.float32)
    return {
        "real": random.uniform(1, 2, (ROWS, 3)).astype(np.float32),
        "binary": binary,
        "signs": 2 * binary - 1,
        "onehot": np.eye(3, dtype=np.float32)[random.integers(0, 3, ROWS)],
        "index": random.integers(0, 3, ROWS).astype(np.int32),
        "class": CLASS,
        "labels": random.integers(1, 3, (ROWS, 2)).astype(np.int32),
        "numbers": random.uniform(0.1, 0.9, ROWS).astype(np.float32),
    }


def _output(kind: str, name: str, x: Any) -> Any:
    """Predictions for targets of a kind."""
    dense = partial(layers.Dense, name=f"{name}_dense")
    if kind == "labels":  # logits of three classes at five times
        return layers.Reshape((5, 3), name=name)(dense(15)(x))
    if kind == "class":
        return layers.UnitNormalization(name=name)(dense(3)(x))
    if kind == "numbers":
        return layers.Reshape((), name=name)(dense(1, "sigmoid")(x))
    activations = {"real": "softplus", "binary": "sigmoid", "onehot": "softmax", "index": "softmax"}
    return layers.Dense(3, activations.get(kind), name=name)(x)


def train(rank: int, world: int, weighted: bool, parts: str) -> dict[str, Any]:
    """The history and the weights of a model with an output for each loss.

    Args:
        rank: This rank.
        world: Number of ranks; 1: plain Keras.
        weighted: Whether each row has a weight.
        parts: Has "losses", "metrics" or both.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if world == 1:
        return _fit(*_compiled(weighted, parts), weighted)
    from sdp_plugins.keras import SMDDPStrategy

    strategy = SMDDPStrategy()
    try:
        with strategy.scope():
            return _fit(*_compiled(weighted, parts), weighted)
    finally:
        strategy.close()


def _compiled(weighted: bool, parts: str) -> tuple[Any, dict[str, str]]:
    """A model, and the kind of each of its outputs' targets."""
    measured: dict[str, list[Any]] = {}
    skipped = WITHOUT_WEIGHTS if weighted else set()
    for name in sorted(METRICS.keys() - skipped) if "metrics" in parts else []:
        measured.setdefault(f"measured_{METRICS[name][0]}", []).append(METRICS[name][1]())
    trained = {n: LOSSES[n] for n in sorted(LOSSES.keys() - skipped) if "losses" in parts}
    kinds = {name: kind for name, (kind, _) in trained.items()}
    kinds |= {name: name.split("_")[1] for name in measured}
    x = keras.Input((FEATURES,))
    model = keras.Model(x, {name: _output(kind, name, x) for name, kind in kinds.items()})
    model.compile(
        keras.optimizers.SGD(0.01),
        loss={name: make() for name, (_, make) in trained.items()}
        | {name: losses.MeanSquaredError() for name in measured},
        loss_weights={name: float(name in LOSSES or not trained) for name in kinds},
        **{"weighted_metrics" if weighted else "metrics": measured},
    )
    return model, kinds


def _fit(model: Any, kinds: dict[str, str], weighted: bool) -> dict[str, Any]:
    # Elsewhere a second, smaller batch costs another compilation of all losses.
    rows = ROWS if keras.backend.backend() == "torch" else BATCH
    random, targets = np.random.default_rng(2), _targets()
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    weight = random.uniform(0.5, 2, rows).astype(np.float32)
    y = {name: targets[kind][:rows] for name, kind in kinds.items()}
    for name in kinds:
        if name == "measured_index":  # has the shape of no prediction
            y[name] = y[name][:, None]
    history = model.fit(
        x,
        y,
        sample_weight=dict.fromkeys(kinds, weight) if weighted else None,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    kernels = {v.path: ops.convert_to_numpy(v) for v in model.trainable_variables}
    return {"history": history.history, "kernels": kernels}


LIMIT_S = 180.0  # of a job: compilers take their time
BOTH = "losses and metrics"
DEFAULT = {
    "torch": [(2, True, BOTH), (3, False, BOTH)],
    "tensorflow": [(2, False, "losses")],
    "jax": [],
}
"""Without `make test-long`: ranks, whether rows are weighted, and parts, as each rank compiles."""


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    """What plain Keras makes, by backend and whether rows are weighted."""
    return {}


@pytest.mark.parametrize(
    ("backend", "world", "weighted", "parts"),
    [
        pytest.param(*(backend, *job), marks=[] if job in DEFAULT[backend] else pytest.mark.long)
        for backend in BACKENDS
        for job in dict.fromkeys(
            [(2, False, BOTH), (2, True, BOTH), (3, False, BOTH), *DEFAULT[backend]]
        )
    ],
)
@pytest.mark.timeout(2 * LIMIT_S + 20)
def test_equal_one_process(
    keras_pool: Any, results: dict[Any, Any], backend: str, world: int, weighted: bool, parts: str
) -> None:
    pool, job = keras_pool(backend, world), (weighted, parts)
    key = (backend, *job)
    if world == 2:
        *ranks, results[key] = pool.run_beside_one(train, *job, timeout_s=LIMIT_S)
    else:
        ranks = pool.run(train, *job, timeout_s=LIMIT_S)
    if key not in results:
        one = keras_pool(backend, 1)
        (results[key],) = one.run(train, *job, timeout_s=LIMIT_S)
    alone = results[key]
    assert alone["kernels"]
    wrong = []
    for part, values in alone.items():
        for name, expected in values.items():
            assert np.isfinite(expected).all(), name
            for rank, found in enumerate(ranks):
                if not np.allclose(found[part][name], expected, rtol=3e-5, atol=3e-5):
                    difference = np.abs(np.asarray(found[part][name]) - expected).max()
                    wrong.append(f"rank {rank}: {part} {name} by {difference:.1e}")
    assert not wrong, "\n".join(wrong)
