"""What joining a strategy changes of a model: its own methods, and nothing of its class.

The model is saved, cloned and pickled as before: none of this is part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import keras

from sdp_plugins.core.errors import CollectiveMismatchError, is_news

from . import keras_internals, losses, rank_zero_callbacks
from .batch_shard import DATA, is_marked
from .data import ShardInfo, in_one_order, shard_data
from .gradients import watch_optimizer
from .initial_sync import InitialSync, check_same_call, sync_once
from .predictions import of_all_ranks
from .progress import Progress, explain
from .variables import average_partial_sums, optimizers_of

if TYPE_CHECKING:
    from .strategy import SMDDPStrategy

_ATTACHED = "_smddp_strategy"
_NEED_COMPILE = ("fit", "evaluate", "train_on_batch", "test_on_batch")
_Function = Callable[..., Any]


def expect(model: Any) -> None:
    """Refuse to train a model until it is compiled in a scope, too."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"model '{model.name}' was made in a strategy's scope, but compiled outside of it: it "
            "would train on this rank alone. Hint: call compile() inside of `with "
            "strategy.scope():`."
        )

    for name in _NEED_COMPILE:
        object.__setattr__(model, name, refuse)


def is_attached(model: Any) -> bool:
    """Whether a strategy trains a model."""
    return _ATTACHED in vars(model)


def attach(model: Any, strategy: SMDDPStrategy) -> None:
    """Have a compiled model trained by a strategy."""
    joined = model.__dict__.get(_ATTACHED)
    if joined is strategy:
        return
    if joined is not None:
        raise RuntimeError(
            f"model '{model.name}' belongs to another strategy. Hint: make a new model, or use the "
            "strategy that it was compiled with."
        )
    for name in _NEED_COMPILE:
        model.__dict__.pop(name, None)  # see `expect`
    object.__setattr__(model, _ATTACHED, strategy)
    strategy.models.add(model)
    if strategy.num_replicas_in_sync == 1:
        return  # Keras as it is
    methods = _Methods(model, strategy)
    for name in _REPLACED:
        if hasattr(model, name):
            object.__setattr__(
                model, name, _in_place_of(getattr(model, name), getattr(methods, name))
            )


def _in_place_of(method: _Function, ours: _Function) -> _Function:
    """A function with the name and the signature of a model's method."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _failing_together(method: _Function) -> _Function:
    """Tell the other ranks of a failure here, and give one of theirs its own name."""

    @wraps(method)
    def call(self: _Methods, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy
        group = strategy.group
        try:
            strategy.backend.synchronize(self._model)
            result = method(self, *args, **kwargs)
            strategy.backend.synchronize(self._model)
            return result
        except (KeyboardInterrupt, SystemExit) as end:
            group.abort(f"{type(end).__name__} in a method of the model")
            raise
        except Exception as error:
            if isinstance(group.failure or error, CollectiveMismatchError):
                explained = explain(strategy.progress, strategy.failure_group)
                if explained is not None:
                    raise explained from None
            if is_news(error):
                group.raise_if_failed(error)  # frameworks have wrapped it
            group.abort(error)
            if text := strategy.backend.translate_error(error):
                text = f"[rank {group.rank}/{group.world_size}] {text}"
                raise CollectiveMismatchError(text, ranks=(), op=method.__name__) from None
            raise

    return call


class _Methods:
    """The methods that a model has instead of its class's, which they call."""

    def __init__(self, model: Any, strategy: SMDDPStrategy) -> None:
        self._model = model
        self._strategy = strategy
        self._class: dict[str, Any] = {name: getattr(model, name, None) for name in _REPLACED}
        self._step = strategy.backend.step(model, strategy)

    # ---- the public methods --------------------------------------------------------------------

    @_failing_together
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """``keras.Model.fit``; ``batch_size`` is that of all ranks together."""
        self._model._assert_compile_called("fit")
        self._strategy.progress = Progress("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = (
                keras_internals.array_slicing.train_validation_split(
                    (x, y, sample_weight), validation_split=validation_split
                )
            )
        seed = check_same_call(self._strategy.group, "fit")
        data = self._shard(
            x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight, seed
        )
        if validation_data is not None:
            val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
            size = validation_batch_size or batch_size
            validation_data = self._shard(val_x, val_y, val_weight, size, validation_steps)
        self._build(data)
        history = self._class["fit"](
            data,
            epochs=epochs,
            verbose=self._verbosity(verbose),
            callbacks=self._callbacks(callbacks),
            validation_data=validation_data,
            shuffle=False,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_freq=validation_freq,
        )
        self._strategy.backend.synchronize(self._model)
        self._strategy.progress.ended = True
        average_partial_sums(self._strategy.group, optimizers_of(self._model))
        self._strategy.group.barrier()  # what rank 0 has written may be read now
        return history

    @_failing_together
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``keras.Model.evaluate``; to be called on all ranks."""
        if "_use_cached_eval_dataset" in kwargs:  # by fit
            return self._class["evaluate"](
                x, verbose=verbose, steps=steps, callbacks=callbacks, return_dict=True, **kwargs
            )
        self._model._assert_compile_called("evaluate")
        check_same_call(self._strategy.group, "evaluate")
        data = self._shard(x, y, sample_weight, batch_size, steps)
        self._build(data)
        return self._class["evaluate"](
            data,
            verbose=self._verbosity(verbose),
            steps=steps,
            callbacks=self._callbacks(callbacks),
            return_dict=return_dict,
            **kwargs,
        )

    @_failing_together
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """``keras.Model.predict``; all ranks call it and get the whole result."""
        check_same_call(self._strategy.group, "predict")
        data = self._shard(x, None, None, batch_size, steps)
        self._build(data)
        return self._class["predict"](
            data,
            verbose=self._verbosity(verbose),
            steps=steps,
            callbacks=self._callbacks(callbacks),
        )

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.train_on_batch`` with a global batch; every rank takes its rows."""
        return self._on_batch("train_on_batch", *args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.test_on_batch`` with a global batch."""
        return self._on_batch("test_on_batch", *args, **kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.predict_on_batch`` with a global batch."""
        return self._on_batch("predict_on_batch", *args, **kwargs)

    # ---- what Keras calls ----------------------------------------------------------------------

    def train_step(self, *args: Any) -> Any:
        """One step on this rank's rows of a batch."""
        return self._step.train(self._class["train_step"], *args)

    def test_step(self, *args: Any) -> Any:
        """One step of an evaluation."""
        return self._step.test(self._class["test_step"], *args)

    def predict_step(self, *args: Any) -> Any:
        """One step of a prediction."""
        return self._step.predict(self._class["predict_step"], *args)

    def make_predict_function(self, *args: Any, **kwargs: Any) -> Any:
        """Have the function return the rows of all ranks."""
        self._class["make_predict_function"](*args, **kwargs)
        model, strategy = self._model, self._strategy
        model.predict_function = of_all_ranks(model.predict_function, strategy)
        return model.predict_function

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None:
            return  # `_build` has done it, and datasets may shuffle anew at every iteration
        if is_marked(data_batch):
            data_batch = data_batch[DATA]
        self._class["_symbolic_build"](data_batch=data_batch)

    # ---- parts ---------------------------------------------------------------------------------

    def _shard(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        shuffle: Any = False,
        class_weight: Any = None,
        seed: int = 0,
    ) -> Any:
        info = ShardInfo(self._strategy.group, seed)
        if shuffle and isinstance(x, keras.utils.PyDataset):
            x, shuffle = in_one_order(x, info.seed)
        source = keras_internals.data_adapters.get_data_adapter(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        return shard_data(source, info)

    def _build(self, data: Any) -> None:
        """Make all variables before the first step, so that ranks can start from equal ones.

        Raises:
            ValueError: A layer keeps something for each row of a batch.
        """
        for layer in self._model._flatten_layers():
            if getattr(layer, "stateful", False):
                raise ValueError(
                    f"layer '{layer.name}' is stateful: it keeps a state for each row of a batch, "
                    "of which every rank has a part. Hint: make it with stateful=False."
                )
        losses.refuse_unreduced(self._model)
        self._strategy.backend.prepare(self._model)
        self._symbolic_build(data_batch=self._strategy.backend.example(data))
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        for optimizer in optimizers_of(self._model):
            watch_optimizer(optimizer, self._strategy)

    def _callbacks(self, callbacks: Any) -> Any:
        start = InitialSync(self._strategy)
        if isinstance(callbacks, keras.callbacks.CallbackList):  # writes what it writes
            start.set_model(self._model)
            callbacks.append(start)
            return callbacks
        if callbacks is None or isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks] if callbacks else []
        return [*rank_zero_callbacks.for_rank(callbacks, self._strategy.rank), start]

    def _verbosity(self, verbose: Any) -> Any:
        return verbose if self._strategy.rank == 0 else 0

    @_failing_together
    def _on_batch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "predict_on_batch":
            given = inspect.signature(self._class[name]).bind(*args, **kwargs).arguments
            batch = tuple(given.get(part) for part in ("x", "y", "sample_weight"))
            losses.refuse_unreduced(self._model)
            self._strategy.backend.prepare(self._model)
            self._symbolic_build(data_batch=batch)
            self._watch_optimizers()
        sync_once(self._model, self._strategy, name)
        return self._class[name](*args, **kwargs)


_REPLACED: Sequence[str] = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
    "train_step",
    "test_step",
    "predict_step",
    "make_predict_function",
    "_symbolic_build",
)
