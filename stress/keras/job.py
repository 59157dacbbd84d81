"""A case in one process: in a rank, or without a group."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.losses import loss as loss_module

from sdp_plugins.core import SdpError
from stress.keras import build, data, spoiling
from stress.keras.plan import Plan

Result = dict[str, Any]


def run(
    rank: int,
    world: int,
    text: str,
    reverse: bool = False,
    spoil: str = "",
    start: Mapping[str, Any] | None = None,
) -> Result:
    """Train, and return the resulting values.

    Args:
        rank: This rank.
        world: Number of ranks; 1: plain Keras.
        text: The plan, as JSON.
        reverse: Whether the rows of each batch are in reverse order.
        spoil: The name of an intentional error; empty for none.
        start: Initial weights; drawn by the plan's seed, with its dtype, if None.
    """
    plan = Plan.from_json(text)
    try:
        with prepared(plan, rank), spoiling.WAYS[spoil](rank) as damage:
            return trained(plan, world, reverse, damage, start)
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "refused": "Hint:" in str(error) and not isinstance(error, SdpError),
            "traceback": traceback.format_exc(),
        }


@contextmanager
def prepared(plan: Plan, rank: int) -> Iterator[None]:
    """Reset Keras as in a new process, with the plan's dtype."""
    keras.utils.clear_session()
    gc.freeze()  # what is left belongs to the frameworks; collecting it takes 0.4 s
    floats = "float64" if plan.dtype == "float64" else "float32"
    keras.config.set_floatx(floats)
    keras.config.set_dtype_policy(plan.dtype)
    keras.utils.set_random_seed(plan.seed % 2**31 + 7 * rank)
    configure(plan.backend, plan.dtype == "float64", plan.fit.get("optimize_graph", False))
    apply_mask = loss_module.apply_mask
    if plan.backend == "torch":
        loss_module.apply_mask = on_a_copy(apply_mask)
    try:
        yield
    finally:
        loss_module.apply_mask = apply_mask
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        configure(plan.backend)


def configure(backend: str, float64: bool = False, optimize_graph: bool = True) -> None:
    """Set what the backend has for the whole process; the defaults are the backend's."""
    if backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", float64)
    if backend == "tensorflow":
        import tensorflow as tf

        options = {"disable_meta_optimizer": not optimize_graph}
        tf.config.optimizer.set_experimental_options(options)


def on_a_copy(apply_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Make `apply_mask` copy its weights.

    On torch, Keras multiplies the program's weights by a loss's mask in place, so weighted metrics
    get other weights in one process than in each rank.
    """

    def applied(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        if sample_weight is not None:
            sample_weight = ops.copy(sample_weight)
        return apply_mask(sample_weight, mask, dtype, reduction)

    return applied


def trained(
    plan: Plan,
    world: int,
    reverse: bool,
    damage: spoiling.Damage,
    start: Mapping[str, Any] | None,
) -> Result:
    """Train with plain Keras or under the strategy."""
    strategy: Any = None
    scope: AbstractContextManager[Any] = nullcontext()
    if world > 1:
        from sdp_plugins.keras import SMDDPStrategy

        strategy = SMDDPStrategy()
        scope = strategy.scope()
    try:
        with scope:
            model, shapes = build.model_of(plan)
            model.compile(**build.compile_options(plan, damage.loss_factor))
        if start is not None:
            for variable, value in zip(model.trainable_variables, start.values(), strict=True):
                variable.assign(value)
        if world == 1:
            # On TensorFlow, Keras would build the optimizer in the graph of the first step, and
            # ScheduleFreeAdamW would not start from the weights.
            model.optimizer.build(model.trainable_variables)
        result = {"start": values(model.trainable_variables)}
        train(model, plan, shapes, reverse, damage, result)
        result["weights"] = values(model.trainable_variables)
        result["state"] = values(others(model))
        accumulates = "gradient_accumulation_steps" in plan.optimizer
        if not (accumulates and plan.fit["source"] == "train_on_batch"):
            # Only `fit` leaves the mean of the gradients that the ranks have accumulated.
            result["optimizer"] = values(model.optimizer.variables)
        return result
    finally:
        if strategy is not None:
            strategy.close()


def train(
    model: Any,
    plan: Plan,
    shapes: Any,
    reverse: bool,
    damage: spoiling.Damage,
    result: Result,
) -> None:
    """Fit, evaluate and predict; store the return values in the result."""
    fit = plan.fit
    given = data.data_of(plan, shapes, fit["rows"], reverse)
    if fit["source"] == "train_on_batch":
        result["batches"] = [
            numbers(model.train_on_batch(*batch, **class_weight(plan), return_dict=True))
            for batch in data.batches(given, plan)
        ]
    else:
        logs = Logs()
        history = model.fit(
            **data.source_of(given, plan),
            **fit_options(plan, shapes, reverse),
            callbacks=[logs, *damage.callbacks()],
        )
        result["history"] = [numbers(dict(zip(history.history, values, strict=True)))
                             for values in zip(*history.history.values(), strict=True)]  # fmt: skip
        result["batches"] = logs.batches
    if fit["evaluate"]:
        whole = dict(zip(("x", "y", "sample_weight"), given.structured(plan), strict=False))
        result["evaluation"] = numbers(
            model.evaluate(**whole, batch_size=fit["batch_size"], verbose=0, return_dict=True)
        )
    if fit["predict"] and not reverse:
        x = data.data_of(plan, shapes, fit["rows"], False, seed=2).structured(plan)[0]
        outputs = keras.tree.flatten(model.predict(x, batch_size=fit["batch_size"], verbose=0))
        result["prediction"] = {f"output {i}": np.asarray(o) for i, o in enumerate(outputs)}


def fit_options(plan: Plan, shapes: Any, reverse: bool) -> dict[str, Any]:
    """Return the arguments of `fit` besides the data."""
    fit = plan.fit
    options = {"epochs": fit["epochs"], "shuffle": False, "verbose": 0, **class_weight(plan)}
    for name in ("validation_split", "steps_per_epoch"):
        if name in fit:
            options[name] = fit[name]
    if "validation_rows" in fit:
        others = data.data_of(plan, shapes, fit["validation_rows"], reverse, seed=1)
        options["validation_data"] = others.structured(plan)
        options["validation_batch_size"] = fit["batch_size"]
    return options


def class_weight(plan: Plan) -> dict[str, Any]:
    """Return the class weights, if there are any."""
    if "class_weight" not in plan.fit:
        return {}
    return {"class_weight": dict(enumerate(plan.fit["class_weight"]))}


class Logs(keras.callbacks.Callback):
    """Stores the logs after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(numbers(logs))


def numbers(logs: Any) -> dict[str, Any]:
    """Return logs as numbers, or as arrays if a metric has several."""
    return {name: np.asarray(value, np.float64) for name, value in logs.items()}


def others(model: Any) -> list[Any]:
    """Return variables that are not trained, except the states of random generators."""
    return [v for v in model.non_trainable_variables if "seed_generator" not in v.path]


def values(variables: Any) -> dict[str, Any]:
    """Return values by position and path."""
    arrays = [ops.convert_to_numpy(variable) for variable in variables]
    assert all(math.prod(array.shape) < 1e6 for array in arrays)
    return {
        f"{place} {variable.path}": np.asarray(array, np.float64)
        for place, (variable, array) in enumerate(zip(variables, arrays, strict=True))
    }
