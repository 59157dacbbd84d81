"""Methods of ``keras.Model`` as the models of a strategy run them.

Those that programs call are wrapped in the class for the rest of the process, so that a subclass's
own `fit` runs first, with its own arguments. Those that Keras calls are replaced on the model. The
model is saved, cloned and pickled as before: the replaced methods are not part of its state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial, wraps
from typing import Any

import keras

from sdp_plugins.core.errors import CollectiveMismatchError, is_news

from . import keras_internals, losses, rank_consistency, rank_zero_callbacks
from .batch_shard import DATA, is_marked
from .context import TrainingContext
from .data import InOneOrder, in_one_order, shard_data
from .gradients import patch_optimizer
from .initial_sync import InitialSync, check_same_call, sync_once
from .metrics import patch_metrics
from .predictions import of_all_ranks
from .rank_consistency import Progress, explain
from .variables import average_partial_sums, optimizers_of

log = logging.getLogger("sdp_plugins.keras")
_ATTACHED = "_smddp_context"
_METHODS = "_smddp_methods"  # absent where the strategy has one rank
_NEED_COMPILE = ("fit", "evaluate", "train_on_batch", "test_on_batch")
_SOURCE = ("x", "y", "batch_size", "sample_weight", "class_weight")
_Function = Callable[..., Any]


def install() -> None:
    """Make the methods that programs call run as the model's strategy does."""
    for name in _CALLED:
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        keras_internals.wrap_once(owner, name, partial(_as_attached, name))


def _as_attached(name: str, method: _Function) -> _Function:
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        of_keras, methods = partial(method, model), vars(model).get(_METHODS)
        if methods is None:
            return of_keras(*args, **kwargs)
        return getattr(methods, name)(of_keras, *args, **kwargs)

    return call


def expect(model: Any) -> None:
    """Refuse to train a model until it is also compiled in a scope."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"model '{model.name}' was made in a strategy's scope, but compiled outside of it: it "
            "would train on this rank alone. Hint: call compile() inside of `with "
            "strategy.scope():`."
        )

    for name in _NEED_COMPILE:
        object.__setattr__(model, name, refuse)


def attached_to(model: Any) -> TrainingContext | None:
    """Return the context that trains a model, or None."""
    return vars(model).get(_ATTACHED)


def attach(model: Any, context: TrainingContext) -> None:
    """Make a strategy train a compiled model."""
    joined = attached_to(model)
    if joined is context:
        return
    if joined is not None:
        raise RuntimeError(
            f"model '{model.name}' belongs to another strategy. Hint: make a new model, or use the "
            "strategy that it was compiled with."
        )
    for name in _NEED_COMPILE:
        model.__dict__.pop(name, None)  # see `expect`
    object.__setattr__(model, _ATTACHED, context)
    context.models.add(model)
    if context.world_size == 1 and not context.is_elastic:
        return  # unmodified Keras
    methods = _PatchedMethods(model, context)
    object.__setattr__(model, _METHODS, methods)
    for name in _REPLACED:
        if hasattr(model, name):
            object.__setattr__(
                model, name, _in_place_of(getattr(model, name), getattr(methods, name))
            )


def _in_place_of(method: _Function, ours: _Function) -> _Function:
    """Return a function with the name and the signature of a model's method."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _failing_together(method: _Function) -> _Function:
    """Report this rank's failure to the other ranks, and raise theirs with its original type."""

    def call(self: _PatchedMethods, *args: Any, **kwargs: Any) -> Any:
        context = self._context
        try:
            context.backend.synchronize(self._model)
            result = method(self, *args, **kwargs)
            context.backend.synchronize(self._model)
            return result
        except (KeyboardInterrupt, SystemExit) as end:
            context.group.abort(f"{type(end).__name__} in a method of the model")
            raise
        except Exception as raised:
            error, group = context.backend.error_of_step(method.__name__) or raised, context.group
            if isinstance(group.failure or error, CollectiveMismatchError):
                explained = explain(context.progress, context.failure_group)
                if explained is not None:
                    raise explained from None
            if is_news(error):
                group.raise_if_failed(error)  # raises a group failure that a framework has wrapped
            group.abort(error)
            if context.job is not None:
                context.job.leave()
            if error is raised:
                raise
            raise error from None

    @wraps(method)
    def alone(self: _PatchedMethods, *args: Any, **kwargs: Any) -> Any:
        with self._context.used_by(self._model):
            return call(self, *args, **kwargs)

    return alone


class _PatchedMethods:
    """A model's methods. Those that programs call get Keras' own method as first argument."""

    def __init__(self, model: Any, context: TrainingContext) -> None:
        self._model = model
        self._context = context
        self._class: dict[str, Any] = {name: getattr(model, name, None) for name in _REPLACED}
        self._step = context.backend.step(model, context)

    # ---- methods that programs call ------------------------------------------------------------

    @_failing_together
    def fit(self, of_keras: _Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.fit``; ``batch_size`` is that of all ranks together."""
        given = keras_internals.arguments("fit", args, kwargs)
        context = self._context
        self._model._assert_compile_called("fit")
        context.progress = Progress("fit")
        data, validation_data = self._training_data(given, check_same_call(context.group, "fit"))
        self._build(data)
        if context.rank == 0:
            name, ranks = self._model.name, context.world_size
            log.info("fit: smddp trains model '%s' on %d ranks", name, ranks)
        options = self._options(given, "validation_split", "validation_batch_size")
        options |= {"validation_data": validation_data, "shuffle": False}
        if context.is_elastic:
            return self._fit_elastic(of_keras, given, options, data)
        history = of_keras(data, **options)
        self._end_fit()
        return history

    def _fit_elastic(
        self, of_keras: _Function, given: dict[str, Any], options: dict[str, Any], data: Any
    ) -> Any:
        from .elastic.fit import ElasticFit
        from .elastic.sync import ElasticSync

        with closing(ElasticFit(self._model, self._context, data, options)) as fit:
            fit.start()
            history = of_keras(fit.data, **options | fit.options(given, ElasticSync(fit)))
            fit.end(self._end_fit)
        return history

    def _end_fit(self) -> None:
        context, group = self._context, self._context.group
        context.backend.synchronize(self._model)
        context.progress.ended = True
        average_partial_sums(group, optimizers_of(self._model))
        group.barrier()  # files of rank 0 are complete from here on

    @_failing_together
    def evaluate(self, of_keras: _Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.evaluate``; all ranks have to call it."""
        if keras_internals.BY_FIT in kwargs:  # called by fit
            return of_keras(*args, **kwargs)
        given = keras_internals.arguments("evaluate", args, kwargs)
        self._model._assert_compile_called("evaluate")
        return self._on_shards("evaluate", of_keras, given)

    @_failing_together
    def predict(self, of_keras: _Function, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.predict``; all ranks call it and get the whole result."""
        return self._on_shards(
            "predict", of_keras, keras_internals.arguments("predict", args, kwargs)
        )

    @_failing_together
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.train_on_batch`` with a global batch."""
        return self._on_batch("train_on_batch", *args, **kwargs)

    @_failing_together
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.test_on_batch`` with a global batch."""
        return self._on_batch("test_on_batch", *args, **kwargs)

    @_failing_together
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``keras.Model.predict_on_batch`` with a global batch."""
        return self._on_batch("predict_on_batch", *args, **kwargs)

    def _on_batch(self, name: str, of_keras: _Function, *args: Any, **kwargs: Any) -> Any:
        """Run a method with a global batch, of which every rank uses its rows."""
        self._context.refuse_replay(name)
        given = inspect.signature(of_keras).bind(*args, **kwargs).arguments
        if name == "predict_on_batch":
            self._build_layers((given["x"],))
        else:
            batch = tuple(given.get(part) for part in ("x", "y", "sample_weight"))
            losses.refuse_unreduced(self._model)
            self._context.backend.prepare(self._model)
            self._symbolic_build(data_batch=batch)
            self._patch_parts()
        sync_once(self._model, self._context, name, rank_consistency.ELEMENTS_OF_A_BATCH)
        return of_keras(*args, **kwargs)

    # ---- methods that Keras calls --------------------------------------------------------------

    def train_step(self, *args: Any) -> Any:
        """Run one training step on this rank's rows of a batch."""
        return self._step.train(self._class["train_step"], *args)

    def test_step(self, *args: Any) -> Any:
        """Run one step of an evaluation."""
        return self._step.test(self._class["test_step"], *args)

    def predict_step(self, *args: Any) -> Any:
        """Run one step of a prediction."""
        return self._step.predict(self._class["predict_step"], *args)

    def make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        """Make the function return the rows of all ranks."""
        self._class["make_predict_function"](*args, **kwargs)
        model, context = self._model, self._context
        model.predict_function = of_all_ranks(model.predict_function, context)
        return model.predict_function

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None:
            return  # `_build` has done it, and datasets may shuffle again at every iteration
        if is_marked(data_batch):
            data_batch = data_batch[DATA]
        self._class["_symbolic_build"](data_batch=data_batch)

    # ---- helpers -------------------------------------------------------------------------------

    def _training_data(self, given: dict[str, Any], seed: int) -> tuple[Any, Any]:
        """Return this rank's rows of the training data and of the validation data."""
        split, validation_data = given["validation_split"], given["validation_data"]
        if split and validation_data is None:
            arrays = (given["x"], given["y"], given["sample_weight"])
            parts = keras_internals.array_slicing.train_validation_split(
                arrays, validation_split=split
            )
            (given["x"], given["y"], given["sample_weight"]), validation_data = parts
        source = {name: given[name] for name in (*_SOURCE, "steps_per_epoch", "shuffle")}
        data = self._shard(source, seed)
        if validation_data is not None:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            source = {
                "x": x,
                "y": y,
                "sample_weight": sample_weight,
                "batch_size": given["validation_batch_size"] or given["batch_size"],
                "steps_per_epoch": given["validation_steps"],
            }
            validation_data = self._shard(source)
        return data, validation_data

    def _on_shards(self, method: str, of_keras: _Function, given: dict[str, Any]) -> Any:
        """Run a method that iterates over its data once."""
        self._context.refuse_replay(method)
        check_same_call(self._context.group, method)
        source = {name: given[name] for name in _SOURCE if name in given}
        data = self._shard(source | {"steps_per_epoch": given["steps"]})
        self._build(data, predicts=method == "predict")
        return of_keras(data, **self._options(given))

    def _options(self, given: dict[str, Any], *but: str) -> dict[str, Any]:
        """Return a Keras method's arguments on this rank, without the data."""
        options = {name: given[name] for name in given if name not in (*_SOURCE, *but)}
        options["verbose"] = options["verbose"] if self._context.rank == 0 else 0
        options["callbacks"] = self._callbacks(options["callbacks"])
        return options

    def _shard(self, source: dict[str, Any], seed: int = 0) -> Any:
        """Wrap Keras' adapter of a method's data so that it yields this rank's rows."""
        if source.get("shuffle") and isinstance(source["x"], keras.utils.PyDataset):
            x, shuffle = in_one_order(source["x"], seed)
            source = source | {"x": x, "shuffle": shuffle}
        # Warnings of Keras' adapters name the calling file; this call keeps a file of Keras there.
        adapter = keras_internals.EpochIterator(**source).data_adapter
        shards = shard_data(adapter, self._context, seed)
        if isinstance(source["x"], InOneOrder):
            shards.ordered = source["x"]
        return shards

    def _build(self, data: Any, predicts: bool = False) -> None:
        """Create all variables before the first step, so that ranks can start from equal ones.

        For a prediction, whose data may lack y, only layers are built.

        Raises:
            ValueError: A layer keeps a value for each row of a batch.
        """
        for layer in self._model._flatten_layers():
            if getattr(layer, "stateful", False):
                raise ValueError(
                    f"layer '{layer.name}' is stateful: it keeps a state for each row of a batch, "
                    "of which every rank has a part. Hint: make it with stateful=False."
                )
        losses.refuse_unreduced(self._model)
        self._context.backend.prepare(self._model)
        batch = self._context.backend.example(data)
        if predicts:
            self._build_layers(batch)
        else:
            self._symbolic_build(data_batch=batch)
        self._patch_parts()

    def _build_layers(self, batch: Any) -> None:
        if all(layer.built for layer in self._model._flatten_layers()):
            return
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch[DATA] if is_marked(batch) else batch)
        symbolic = keras_internals.map_leaves(
            lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)),
            x,
        )
        keras_internals.compute_output_spec(self._model, symbolic, training=False)

    def _patch_parts(self) -> None:
        """Make the model's metrics and optimizers use the running step."""
        patch_metrics(self._model)
        for optimizer in optimizers_of(self._model):
            patch_optimizer(optimizer, self._context)

    def _callbacks(self, callbacks: Any) -> Any:
        ours = [
            *rank_zero_callbacks.for_rank(callbacks, self._context.rank),
            InitialSync(self._context),
        ]
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            return ours
        params = callbacks.params or {}  # Keras adds none of its own, nor other callbacks
        return keras.callbacks.CallbackList(ours, model=self._model, **params)


_CALLED: Sequence[str] = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
_REPLACED: Sequence[str] = (
    "train_step",
    "test_step",
    "predict_step",
    "make_predict_function",
    "_symbolic_build",
)
