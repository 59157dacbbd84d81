"""Every private name of Keras that this plug-in leans on; nothing else imports any.

Public Keras has no place for data parallelism of processes: its trainers hand the whole batch to
one model. The names here exist, with the same meaning, in all versions that ``pyproject.toml``
allows; ``check`` says which one has moved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import keras
from keras.src import tree
from keras.src.backend import get_keras_mask, result_type, set_keras_mask
from keras.src.backend import nn as backend_nn
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.losses import loss as loss_module
from keras.src.losses.loss import Loss
from keras.src.metrics.metric import Metric
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.trainers import data_adapters
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.trainer import Trainer

__all__ = [
    "ArrayDataAdapter",
    "BaseOptimizer",
    "CompileMetrics",
    "DataAdapter",
    "Loss",
    "LossScaleOptimizer",
    "Metric",
    "StatelessScope",
    "Trainer",
    "array_slicing",
    "backend_nn",
    "check",
    "data_adapters",
    "get_keras_mask",
    "is_of_keras",
    "loss_module",
    "map_leaves",
    "replaced",
    "result_type",
    "set_keras_mask",
    "tree",
]

_MEMBERS: tuple[tuple[object, str, str], ...] = (
    (Trainer, "compile", "where a model joins the strategy"),
    (Trainer, "_symbolic_build", "builds models, losses and metrics from a batch's shapes"),
    (keras.Layer, "_flatten_layers", "finds the layers whose state is kept equal"),
    (keras.Model, "make_predict_function", "whose function returns all ranks' rows"),
    (keras.Model, "get_metrics_result", "the logs of a step"),
    (BaseOptimizer, "_clip_gradients", "comes after accumulation and before everything else"),
    (BaseOptimizer, "apply", "where gradients enter"),
    (LossScaleOptimizer, "check_finite", "is asked of all ranks"),
    (ArrayDataAdapter, "_get_iterator", "cuts batches of arrays"),
    (array_slicing, "convert_to_sliceable", "makes any array sliceable"),
    (array_slicing, "slice_tensorflow_sparse_wrapper", "cuts batches of sparse tensors"),
    (array_slicing, "train_validation_split", "is what validation_split means"),
    (data_adapters, "get_data_adapter", "reads every source of data"),
    (loss_module, "reduce_weighted_values", "knows what a loss is divided by"),
    (backend_nn, "moments", "normalizes batches"),
    (StatelessScope, "get_current_value", "holds metrics in JAX steps"),
)
_PARAMETERS = (
    (loss_module.reduce_weighted_values, ("values", "sample_weight", "mask", "reduction", "dtype")),
    (
        data_adapters.get_data_adapter,
        ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight"),
    ),
    (backend_nn.moments, ("x", "axes", "keepdims", "synchronized")),
    (Trainer._symbolic_build, ("self", "iterator", "data_batch")),
    (BaseOptimizer._clip_gradients, ("self", "grads")),
)
ATTRIBUTES = {
    "ArrayDataAdapter": ("_inputs", "_num_samples", "_batch_size", "_shuffle"),
    "Layer": ("_non_trainable_variables", "_seed_generators"),
    "Model": ("_initial_epoch", "_loss_tracker"),
    "MeanMetricWrapper": ("_fn",),
    "Optimizer": ("_accumulated_gradients", "_iterations", "gradient_accumulation_steps"),
    "JAX's Model": ("_jax_state", "_jax_state_synced"),
}
"""What objects have besides; ``tests/keras/test_hooks.py`` looks at some."""


def check() -> None:
    """Look for everything that the plug-in needs of Keras.

    Raises:
        ImportError: A name has moved, or means something else.
    """
    for owner, name, purpose in _MEMBERS:
        if not hasattr(owner, name):
            raise _moved(f"{getattr(owner, '__name__', owner)}.{name}, which {purpose}")
    for function, expected in _PARAMETERS:
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            raise _moved(f"the parameters of {function.__qualname__}: {found}, not {expected}")


def _moved(what: str) -> ImportError:
    return ImportError(
        f"Keras {keras.__version__} has moved {what}. Hint: use a version of Keras that this "
        "sdp-plugins was made for (pip install 'sdp-plugins[keras]' takes one), or a newer "
        "sdp-plugins."
    )


def is_of_keras(thing: Any) -> bool:
    """Whether a function or a class is Keras' own."""
    return str(getattr(thing, "__module__", "")).split(".")[0] == "keras"


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Replace every leaf but None; Keras has learned to leave out None by itself in 3.12."""
    return tree.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module, a class or an object another attribute inside of the block."""
    absent = object()
    before = vars(owner).get(name, absent)
    set_attribute(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            object.__delattr__(owner, name)  # only objects get what they did not have
        else:
            set_attribute(owner, name, before)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute past what Keras does to track them."""
    (setattr if isinstance(owner, (type, ModuleType)) else object.__setattr__)(owner, name, value)
