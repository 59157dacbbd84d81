"""All private names of TensorFlow that a ``tf.distribute.Strategy`` needs.

They create its variables: those of MultiWorkerMirroredStrategy, with one component in each process.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_HINT = "Hint: use TensorFlow 2.18 to 2.22, or DistributedGradientTape, which needs none of it."
try:
    from tensorflow.python.distribute.distribute_lib import UpdateContext
    from tensorflow.python.distribute.distribute_utils import (
        VARIABLE_CLASS_MAPPING,
        VARIABLE_POLICY_MAPPING,
        create_mirrored_variable,
        is_mirrored,
        is_sync_on_read,
        select_replica,
        update_regroup,
        validate_colocate_distributed_variable,
        value_container,
    )
    from tensorflow.python.distribute.values import DistributedValues, DistributedVariable
except ImportError as error:
    raise ImportError(
        f"this TensorFlow has moved what SMDDPStrategy is made of: {error}. {_HINT}"
    ) from error

__all__ = [
    "FINITE_CHECK",
    "KERAS_TRAINER",
    "DistributedVariable",
    "UpdateContext",
    "is_mirrored",
    "is_sync_on_read",
    "local",
    "mirrored_variable",
    "select_replica",
    "update_regroup",
    "validate_colocate_distributed_variable",
    "value_container",
]

MEMBERS = (
    (DistributedVariable, "_get"),
    (DistributedVariable, "_get_cross_replica"),
    (tf.compat.v1.distribute.StrategyExtended, "_container_strategy"),
)
for _owner, _name in MEMBERS:
    if not hasattr(_owner, _name):
        raise ImportError(f"this TensorFlow has moved {_owner.__name__}.{_name}. {_HINT}")

KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"
FINITE_CHECK = "LossScaleOptimizer.check_finite"
"""A module and a function of Keras, recognised as callers."""


def mirrored_variable(strategy: Any, create: Any, **kwargs: Any) -> Any:
    """Return a distributed variable of the class for ``synchronization`` and ``aggregation``."""
    return create_mirrored_variable(
        strategy, create, VARIABLE_CLASS_MAPPING, VARIABLE_POLICY_MAPPING, **kwargs
    )


def local(value: Any) -> Any:
    """Return this process's component of a value."""
    return value.values[0] if isinstance(value, DistributedValues) else value
