"""The losses and metrics of random models, grouped by the targets that they need.

A head is a Dense layer on a value: it has one row of outputs for each row of the batch (on a
vector), for each step (on a sequence) or for each pixel (on an image).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 3
"""Outputs or classes of a head."""

EVERYWHERE = ("vector", "sequence", "image")
ROWS_ONLY = ("vector",)
OF_ROWS = ("CTC", "Dice", "Tversky")
"""Losses with a number for each row, whatever the value of the head."""
PIECEWISE_LINEAR = ("MeanAbsoluteError", "Huber", "Hinge", "CategoricalHinge")
"""Losses, linear in places, whose gradients may cancel exactly in one process, but not on ranks."""
REDUCTION = ("sum_over_batch_size",) * 6 + ("sum", "mean", "mean_with_sample_weight")


@dataclass(frozen=True)
class Loss:
    """A loss of the table.

    Attributes:
        loss: Its name in `keras.losses`; lower case: a function of `build.py`.
        targets: The kind of targets: see `data.targets`.
        activation: The head's activation.
        options: The values to draw each option from.
        kinds: The kinds of value that the head accepts.
        weight: The relative frequency in the draw.
        has_rows: Whether the loss has at least one number for each row.
    """

    loss: str
    targets: str
    activation: str | None = None
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    kinds: Sequence[str] = EVERYWHERE
    weight: int = 4
    has_rows: bool = True

    def takes_weights(self, kind: str) -> bool:
        """Return whether Keras can weight the loss's numbers for this kind of value."""
        return self.has_rows and (kind == "vector" or self.loss not in OF_ROWS)


LOGITS = {"from_logits": (True,)}
FOCAL = {"apply_class_balancing": (False, True), "gamma": (1.0, 2.0)}
SMOOTH = {"label_smoothing": (0.0, 0.1)}
LOSSES: tuple[Loss, ...] = (
    Loss("MeanSquaredError", "real", weight=10),
    Loss("MeanAbsoluteError", "real"),
    Loss("MeanAbsolutePercentageError", "positive", "softplus", weight=2),
    Loss("MeanSquaredLogarithmicError", "positive", "softplus"),
    Loss("CosineSimilarity", "real", None, {"axis": (-1,)}),
    Loss("Huber", "real", None, {"delta": (0.5, 1.0)}),
    Loss("LogCosh", "real"),
    Loss("Poisson", "positive", "softplus"),
    Loss("Hinge", "sign"),
    Loss("SquaredHinge", "sign"),
    Loss("CategoricalHinge", "one_hot"),
    Loss("KLDivergence", "probabilities", "softmax"),
    Loss("BinaryCrossentropy", "binary", None, {**LOGITS, **SMOOTH}),
    Loss("BinaryCrossentropy", "binary", "sigmoid", SMOOTH),
    Loss("BinaryFocalCrossentropy", "binary", "sigmoid", {**FOCAL, **SMOOTH}),
    Loss("BinaryFocalCrossentropy", "binary", None, {**FOCAL, **LOGITS}),
    Loss("CategoricalCrossentropy", "one_hot", None, {**LOGITS, **SMOOTH}),
    Loss("CategoricalCrossentropy", "one_hot", "softmax", SMOOTH),
    Loss("CategoricalFocalCrossentropy", "one_hot", "softmax", {"alpha": (0.25, 0.5)}),
    Loss("CategoricalGeneralizedCrossEntropy", "class", "softmax", {"q": (0.3, 0.7)}, ROWS_ONLY),
    Loss("SparseCategoricalCrossentropy", "class", None, {**LOGITS, "ignore_class": (None, 0)},
         weight=10),
    Loss("SparseCategoricalCrossentropy", "class", "softmax", weight=6),
    Loss("CTC", "labels", None, {}, ("sequence",), 2),
    Loss("Dice", "binary", "sigmoid", {"axis": (-1, (1,))}, weight=2),
    Loss("Tversky", "binary", "sigmoid", {"axis": (-1,), "alpha": (0.3, 0.5)}, weight=2),
    Loss("own_loss", "real", weight=2),
    Loss("own_loss_object", "real", weight=2),
    # These have one number for all rows, or relate rows: the plug-in must refuse them or be exact.
    Loss("Dice", "binary", "sigmoid", weight=1, has_rows=False),
    Loss("Tversky", "binary", "sigmoid", {"axis": (None, (0,))}, weight=1, has_rows=False),
    Loss("Circle", "class", "unit", {"gamma": (2.0,)}, ROWS_ONLY, 1, has_rows=False),
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A metric of the table.

    Attributes:
        metric: Its name in `keras.metrics`; lower case: a function of `build.py`.
        options: The values to draw each option from.
        kinds: The kinds of value that the head accepts.
        jumps: Whether it compares outputs with thresholds or with each other, so that rounding in
            16 bits may change its result by a whole row.
    """

    metric: str
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    kinds: Sequence[str] = EVERYWHERE
    jumps: bool = False

    @property
    def takes_weights(self) -> bool:
        """False for one number per batch, which Keras cannot weight."""
        return self.metric not in ("loss_object", "own_function")


def jumping(name: str, options: Any = None, kinds: Sequence[str] = EVERYWHERE) -> Metric:
    """Return a metric that compares outputs."""
    return Metric(name, options or {}, kinds, jumps=True)


OF_ANY = (
    Metric("MeanSquaredError"),
    Metric("MeanAbsoluteError"),
    Metric("RootMeanSquaredError"),
    Metric("LogCoshError"),
    Metric("CosineSimilarity", {"axis": (-1,)}),
    Metric("own_maximum"),
    Metric("own_function"),
    Metric("own_sum"),
)
CLASSES = {"num_classes": (WIDTH,), "sparse_y_pred": (False,)}
AT = {"num_thresholds": (7, 20)}
THRESHOLD = {"threshold": (None, 0.4), "average": (None, "micro", "macro", "weighted")}
TWO = (None, 0.4, (0.3, 0.6))
AGGREGATION = ("uniform_average", "variance_weighted_average", None)
METRICS: dict[str, tuple[Metric, ...]] = {
    "real": (
        *OF_ANY,
        Metric("R2Score", {"class_aggregation": AGGREGATION}, ROWS_ONLY),
        Metric("PearsonCorrelation"),
        Metric("ConcordanceCorrelation"),
        Metric("loss_object", {"loss": ("Huber", "LogCosh")}),
        jumping("Accuracy"),
    ),
    "positive": (
        *OF_ANY,
        Metric("Poisson"),
        Metric("MeanAbsolutePercentageError"),
        Metric("MeanSquaredLogarithmicError"),
    ),
    "sign": (*OF_ANY, Metric("Hinge"), Metric("SquaredHinge")),
    "binary": (
        *OF_ANY,
        Metric("BinaryCrossentropy", LOGITS),
        Metric("loss_object", {"loss": ("BinaryFocalCrossentropy", "Dice", "Tversky")}),
        jumping("BinaryAccuracy", {"threshold": (0.5, 0.3)}),
        jumping("AUC", {**AT, "curve": ("ROC", "PR"), "multi_label": (False, True)}, ROWS_ONLY),
        jumping(
            "AUC", {**AT, "from_logits": (True,), "summation_method": ("minoring", "majoring")}
        ),
        jumping("Precision", {"thresholds": TWO}),
        jumping("Precision", {"top_k": (1,)}),
        jumping("Recall", {"thresholds": (None, 0.4), "class_id": (None, 1)}),
        jumping("TruePositives", {"thresholds": TWO}),
        jumping("TrueNegatives", {"thresholds": TWO}),
        jumping("FalsePositives", {"thresholds": TWO}),
        jumping("FalseNegatives", {"thresholds": TWO}),
        jumping("SensitivityAtSpecificity", {**AT, "specificity": (0.5,)}),
        jumping("SpecificityAtSensitivity", {**AT, "sensitivity": (0.5,)}),
        jumping("PrecisionAtRecall", {**AT, "recall": (0.5,)}),
        jumping("RecallAtPrecision", {**AT, "precision": (0.5,)}),
        jumping("BinaryIoU", {"threshold": (0.5,), "target_class_ids": ((0, 1), (1,))}),
        jumping("F1Score", THRESHOLD, ROWS_ONLY),
        jumping("FBetaScore", {**THRESHOLD, "beta": (0.5,)}, ROWS_ONLY),
    ),
    "one_hot": (
        *OF_ANY,
        Metric("CategoricalCrossentropy", LOGITS),
        Metric("CategoricalHinge"),
        jumping("CategoricalAccuracy"),
        jumping("TopKCategoricalAccuracy", {"k": (2,)}),
        jumping("OneHotIoU", {"num_classes": (WIDTH,), "target_class_ids": ((0, 2),)}),
        jumping("OneHotMeanIoU", {"num_classes": (WIDTH,)}),
        jumping("F1Score", {"average": (None, "macro")}, ROWS_ONLY),
        jumping("FBetaScore", {"beta": (2.0,), "average": ("micro", "weighted")}, ROWS_ONLY),
        jumping("accuracy"),
    ),
    "probabilities": (*OF_ANY, Metric("KLDivergence")),
    "class": (
        Metric("SparseCategoricalCrossentropy", LOGITS),
        Metric("loss_object", {"loss": ("SparseCategoricalCrossentropy",)}),
        Metric("own_sum"),
        jumping("SparseCategoricalAccuracy"),
        jumping("SparseTopKCategoricalAccuracy", {"k": (2,)}),
        jumping("MeanIoU", CLASSES),
        jumping("IoU", {**CLASSES, "target_class_ids": ((0,), (1, 2))}),
        jumping("accuracy"),
    ),
    "labels": (Metric("own_sum"),),
}
