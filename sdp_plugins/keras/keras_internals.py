"""All private names of Keras that this plug-in uses; no other module imports any.

Public Keras has no interface for data parallelism across processes: its trainers pass the whole
batch to one model. These names exist, with the same meaning, in all versions that
``pyproject.toml`` allows; ``check`` reports any that has changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

import keras

_HINT = (
    "Hint: use a version of Keras that this sdp-plugins was made for (pip install "
    "'sdp-plugins[keras]' takes one), or a newer sdp-plugins."
)
try:
    from keras.src.backend import compute_output_spec, get_keras_mask, set_keras_mask
    from keras.src.backend import nn as backend_nn
    from keras.src.losses import loss as loss_module
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.trainers import data_adapters
    from keras.src.trainers.compile_utils import CompileMetrics
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.src.trainers.trainer import Trainer
except ImportError as error:
    raise ImportError(
        f"Keras {keras.__version__} has moved what SMDDPStrategy is made of: {error}. {_HINT}"
    ) from error

__all__ = [
    "ArrayDataAdapter",
    "BaseOptimizer",
    "CompileMetrics",
    "DataAdapter",
    "EpochIterator",
    "Trainer",
    "arguments",
    "array_slicing",
    "backend_nn",
    "check",
    "compute_output_spec",
    "data_adapters",
    "get_keras_mask",
    "is_of_keras",
    "loss_module",
    "map_leaves",
    "set_keras_mask",
    "wrap_once",
]

_MEMBERS: tuple[tuple[object, str, str], ...] = (
    (Trainer, "compile", "where a model joins the strategy"),
    (Trainer, "_assert_compile_called", "refuses models that are not compiled"),
    (Trainer, "_symbolic_build", "builds models, losses and metrics from a batch's shapes"),
    (keras.Layer, "_flatten_layers", "finds the layers whose state is kept equal"),
    (keras.Model, "make_train_function", "is what training begins with"),
    (keras.Model, "make_predict_function", "whose function returns all ranks' rows"),
    (keras.Model, "get_metrics_result", "the logs of a step"),
    (BaseOptimizer, "_clip_gradients", "comes after accumulation and before everything else"),
    (BaseOptimizer, "apply", "where gradients enter"),
    (keras.optimizers.LossScaleOptimizer, "check_finite", "is asked of all ranks"),
    (ArrayDataAdapter, "_get_iterator", "cuts batches of arrays"),
    (array_slicing, "TensorflowSparseWrapper", "holds the arrays of a sparse tensor"),
    (array_slicing, "convert_to_sliceable", "makes any array sliceable"),
    (array_slicing, "slice_tensorflow_sparse_wrapper", "cuts batches of sparse tensors"),
    (array_slicing, "train_validation_split", "is what validation_split means"),
    (data_adapters, "get_data_adapter", "reads every source of data"),
    (loss_module, "apply_mask", "knows what a mask and weights leave"),
    (loss_module, "reduce_weighted_values", "knows what a loss is divided by"),
    (backend_nn, "moments", "normalizes batches"),
)
_SOURCE = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")
_PARAMETERS = (
    (loss_module.reduce_weighted_values, ("values", "sample_weight", "mask", "reduction", "dtype")),
    (loss_module.apply_mask, ("sample_weight", "mask", "dtype", "reduction")),
    (data_adapters.get_data_adapter, _SOURCE),
    (EpochIterator.__init__, ("self", *_SOURCE, "steps_per_execution")),
    (backend_nn.moments, ("x", "axes", "keepdims", "synchronized")),
    (Trainer._assert_compile_called, ("self", "method_name")),
    (Trainer._symbolic_build, ("self", "iterator", "data_batch")),
    (BaseOptimizer._clip_gradients, ("self", "grads")),
)
_READ = ("x", "batch_size", "verbose", "callbacks")
_ARGUMENTS = {
    "fit": (
        *(*_READ, "y", "sample_weight", "class_weight", "shuffle", "steps_per_epoch"),
        *("validation_data", "validation_split", "validation_steps", "validation_batch_size"),
    ),
    "evaluate": (*_READ, "y", "sample_weight", "steps", "kwargs"),
    "predict": (*_READ, "steps"),
}
"""Arguments of ``keras.Model``'s methods that this plug-in changes; it passes on all others."""
ATTRIBUTES = {
    "ArrayDataAdapter": ("_inputs", "_num_samples", "_batch_size", "_shuffle"),
    "CompileLoss": ("_user_loss",),
    "EpochIterator": ("data_adapter",),
    "Layer": ("_non_trainable_variables", "_seed_generators"),
    "LossFunctionWrapper": ("fn", "_fn_kwargs"),
    "MeanMetricWrapper": ("_fn", "_fn_kwargs"),
    "Model": ("_compile_loss", "_initial_epoch", "_loss_tracker"),
    "MultiOptimizer": ("_inner_optimizers",),
    "Optimizer": ("_accumulated_gradients", "_iterations", "gradient_accumulation_steps"),
    "Variable": ("_value", "_shape"),
    "JAX's Model": ("_get_jax_state", "_jax_state", "_jax_state_synced"),
    "torch's Optimizer": (
        *("_parallel_update_step", "_trainable_variables", "_trainable_variables_indices"),
        *("_get_variable_index", "_variables"),
    ),
}
"""Further attributes of objects; ``tests/keras/test_keras_internals.py`` checks some."""
LOGITS = "_keras_logits"
"""The attribute of a tensor of probabilities that holds the logits, on TensorFlow."""
BY_FIT = "_use_cached_eval_dataset"
"""The argument by which ``fit`` marks its own calls of ``evaluate``."""
_IS_WRAPPER = "_smddp_wrapper"
_wrapping = Lock()


def check() -> None:
    """Check all names that the plug-in needs from Keras.

    Raises:
        ImportError: A name does not exist or has changed its meaning.
    """
    for owner, name, purpose in _MEMBERS:
        if not hasattr(owner, name):
            raise _moved(f"{getattr(owner, '__name__', owner)}.{name}, which {purpose}")
    for function, expected in _PARAMETERS:
        found = tuple(inspect.signature(function).parameters)
        if found != expected:
            raise _moved(f"the parameters of {function.__qualname__}: {found}, not {expected}")
    for method, names in _ARGUMENTS.items():
        if missing := set(names) - set(inspect.signature(getattr(keras.Model, method)).parameters):
            raise _moved(f"arguments of Model.{method}: {', '.join(sorted(missing))}")


def _moved(what: str) -> ImportError:
    return ImportError(f"Keras {keras.__version__} has moved {what}. {_HINT}")


def is_of_keras(thing: Any) -> bool:
    """Return whether a function or a class is Keras' own."""
    return str(getattr(thing, "__module__", "")).split(".")[0] == "keras"


def arguments(method: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a method of ``keras.Model``, by name.

    Raises:
        TypeError: The method does not accept these arguments.
    """
    try:
        bound = inspect.signature(getattr(keras.Model, method)).bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{method}() {error}") from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.pop("self")
    return given | given.pop("kwargs", {})


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Replace every leaf except None; Keras itself skips None since 3.12."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), structure
    )


def wrap_once(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap one of Keras' functions until the process ends; a second call changes nothing."""
    with _wrapping:
        function = getattr(owner, name)
        if not hasattr(function, _IS_WRAPPER):
            around = wraps(function)(wrapper(function))
            setattr(around, _IS_WRAPPER, True)
            setattr(owner, name, around)
