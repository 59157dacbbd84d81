"""The training of random models: optimizers, and arguments of `compile` and `fit`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stress.keras import heads

if TYPE_CHECKING:
    from stress.keras.plan import Output

DTYPES = ("float64", "float32", "mixed_float16", "mixed_bfloat16")
DTYPE_WEIGHTS = (75, 18, 4, 3)
"""Mostly float64: rounding differences are far below any error there."""

OPTIMIZERS: dict[str, Mapping[str, Sequence[Any]]] = {
    "SGD": {
        "learning_rate": (0.02, 0.1),
        "momentum": (0.0, 0.5, 0.9),
        "nesterov": (False, True),
    },
    "RMSprop": {
        "learning_rate": (0.003,),
        "momentum": (0.0, 0.5),
        "centered": (False, True),
        "epsilon": (1e-3,),
    },
    "Adam": {"learning_rate": (0.003, 0.01), "amsgrad": (False, True), "epsilon": (1e-3,)},
    "AdamW": {"learning_rate": (0.003,), "weight_decay": (0.01,), "epsilon": (1e-3,)},
    "Adadelta": {"learning_rate": (0.1,), "epsilon": (1e-3,)},
    "Adagrad": {"learning_rate": (0.01,), "epsilon": (1e-3,)},
    "Adamax": {"learning_rate": (0.003,), "epsilon": (1e-3,)},
    # With the default of 1e-30, a gradient of only rounding moves a weight as far as any other.
    "Adafactor": {
        "learning_rate": (0.01,),
        "relative_step": (True, False),
        "epsilon_1": (1e-6,),
    },
    "Nadam": {"learning_rate": (0.003,), "epsilon": (1e-3,)},
    "Ftrl": {"learning_rate": (0.01,), "l1_regularization_strength": (0.0, 0.001)},
    "Lamb": {"learning_rate": (0.003,), "epsilon": (1e-3,)},
    "Lion": {"learning_rate": (0.001,)},
    "Muon": {"learning_rate": (0.003,), "epsilon": (1e-3,)},
    "ScheduleFreeAdamW": {"learning_rate": (0.003,), "warmup_steps": (0, 2), "epsilon": (1e-3,)},
}
WEIGHTS = {"SGD": 12, "Adam": 6, "RMSprop": 3}
SCHEDULES = (
    ("ExponentialDecay", {"decay_steps": 2, "decay_rate": 0.7}),
    ("PiecewiseConstantDecay", {"boundaries": [2, 4], "values": [0.02, 0.01, 0.005]}),
    ("CosineDecay", {"decay_steps": 8}),
    ("PolynomialDecay", {"decay_steps": 6}),
    ("InverseTimeDecay", {"decay_steps": 2, "decay_rate": 0.5}),
)
CLIPPING = (
    {"clipnorm": 0.02},
    {"clipnorm": 0.5},
    {"global_clipnorm": 0.05},
    {"global_clipnorm": 1.0},
    {"clipvalue": 0.003},
    {"clipvalue": 0.05},
)
SOURCES = {
    "tensorflow": ("arrays", "arrays", "arrays", "tf.data", "PyDataset", "generator"),
    "torch": ("arrays", "arrays", "arrays", "DataLoader", "PyDataset", "generator", "tf.data"),
    "jax": ("arrays", "arrays", "arrays", "arrays", "PyDataset", "generator", "tf.data"),
}

EAGER = 0.65
"""Share of cases that run eagerly on TensorFlow, where tracing is most of a graph's time. In the
other cases there, and on JAX, every shape of a batch costs a trace: fewer have a last, smaller
batch, validation, evaluation or prediction."""


def optimizer(
    draw: random.Random, backend: str, dtype: str, outputs: Sequence[Output]
) -> dict[str, Any]:
    """Return an optimizer's name and options."""
    names = list(OPTIMIZERS)
    if dtype.startswith("mixed"):
        names = ["SGD", "Adam"]  # an optimizer that divides by small numbers shows only rounding
    name = draw.choices(names, [WEIGHTS.get(name, 1) for name in names])[0]
    if name == "Lion" and any(output.loss in heads.PIECEWISE_LINEAR for output in outputs):
        name = "Adam"  # Lion moves a weight as far for a gradient of 1e-10 as for one of 1
    options = {key: draw.choice(list(values)) for key, values in OPTIMIZERS[name].items()}
    if draw.random() < 0.15:
        schedule, arguments = draw.choice(SCHEDULES)
        options["schedule"] = {"name": schedule, **arguments}
    if draw.random() < 0.35:
        options |= draw.choice(CLIPPING)
    if draw.random() < 0.2:
        options["gradient_accumulation_steps"] = draw.choice([2, 3, 4])
    if draw.random() < 0.15 and backend != "jax":
        # On JAX, Keras itself leaves deleted arrays in the model.
        options |= {"use_ema": True, "ema_momentum": draw.choice([0.5, 0.9])}
        options["ema_overwrite_frequency"] = draw.choice([None, 2, 3])
    if draw.random() < 0.15:
        options["weight_decay"] = draw.choice([0.01, 0.1])
    if draw.random() < 0.06:
        options["loss_scale_factor"] = draw.choice([4.0, 100.0])
    return {"name": name, **{key: value for key, value in options.items() if value is not None}}


def fit(draw: random.Random, backend: str, world: int, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return arguments of `compile` and `fit` by name."""
    eager = backend == "tensorflow" and draw.random() < EAGER
    slow = backend != "torch" and not eager
    batch_size = draw.choice([1, 3, 4, 4, 6, 6, 8, 8])
    full = draw.choice([1, 2, 2, 3])
    # The last batch is full, or so short that a rank has one row or none.
    last = draw.choice([0, 1, 1, world - 1, world, world + 1, 2 * world - 1]) % batch_size
    if slow and draw.random() < 0.5:
        last = 0
    source = draw.choice(SOURCES[backend])
    options: dict[str, Any] = {
        "source": source,
        "batch_size": batch_size,
        "rows": full * batch_size + last,
        "epochs": draw.choice([1, 2, 2, 3]),
        "structure": draw.choice(["list", "dict"]),
        "evaluate": draw.random() < (0.15 if slow else 0.3),
        "predict": draw.random() < (0.25 if slow else 0.5),
    }
    weighted = any(output.sample_weight for output in outputs)
    if draw.random() < (0.15 if slow else 0.3):
        options["validation_rows"] = draw.choice([1, 5, 9])
    elif source == "arrays" and not weighted and draw.random() < 0.15 and options["rows"] > 3:
        options["validation_split"] = 0.3
    if draw.random() < 0.5 and not weighted and takes_class_weight(options, outputs):
        options["class_weight"] = [0.5, 2.0, 1.25]
    options |= _execution(draw, backend, eager)
    if source == "generator" or draw.random() < 0.05:
        options["steps_per_epoch"] = full + bool(last)
    if source == "arrays" and draw.random() < 0.06:
        options |= {"source": "train_on_batch", "epochs": 1}
        for name in ("steps_per_epoch", "validation_rows", "validation_split"):
            options.pop(name, None)
    return options


def _execution(draw: random.Random, backend: str, eager: bool) -> dict[str, Any]:
    """Return arguments of `compile` that tell how steps run."""
    options: dict[str, Any] = {}
    if eager:
        options["run_eagerly"] = True
    elif backend != "torch" and draw.random() < 0.12:
        options["steps_per_execution"] = draw.choice([2, 3])
    elif backend != "tensorflow" and draw.random() < (0.06 if backend == "torch" else 0.03):
        options["run_eagerly"] = True
    if backend == "tensorflow" and not eager and draw.random() < 0.3:
        options["optimize_graph"] = True
    return options


def takes_class_weight(options: Mapping[str, Any], outputs: Sequence[Output]) -> bool:
    """Return whether Keras accepts class weights."""
    return (
        len(outputs) == 1
        and outputs[0].targets in ("class", "one_hot")
        and outputs[0].kind == "vector"
        and options["structure"] == "list"
        and options["source"] not in ("generator", "DataLoader")
    )
