"""The implementation of a distribution strategy: one replica per process, on our collectives.

``strategy.run`` returns this rank's plain tensors; a per-replica value of TensorFlow consists of
these tensors on all ranks. The scope's variables are TensorFlow's distributed variables with one
component in each process, so ``synchronization`` and ``aggregation`` have the same meaning as under
MultiWorkerMirroredStrategy.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from . import datasets
from . import tf_internals as internals
from .collectives import TensorFlowCollectives

REFUSED = (
    "model.fit, evaluate and predict do not work under the strategy of a loop of one's own: "
    "clipping, metrics, predictions, BatchNormalization and loss scales would be wrong. Hint: use "
    "sdp_plugins.keras.SMDDPStrategy, or a loop with strategy.run(step, args=(batch,))."
)
_UNREDUCED = (tf.bool, tf.string)


class OneReplica(tf.compat.v1.distribute.StrategyExtended):  # type: ignore[misc]
    """Implements ``tf.distribute.StrategyExtended``: this rank, one replica of ``world_size``."""

    def __init__(self, strategy: Any, collectives: TensorFlowCollectives) -> None:
        """Use the collectives of a job."""
        super().__init__(strategy)
        self._collectives = collectives
        self._rank, self._ranks = collectives.group.rank, collectives.group.world_size
        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        self._device = f"/job:localhost/replica:0/task:0{devices[0].name}"

    # ---- running -------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if _caller() == internals.KERAS_TRAINER:
            raise RuntimeError(REFUSED)
        with tf.distribute.ReplicaContext(self._container_strategy(), self._rank):
            result = fn(*args, **kwargs)
        # Keras runs this check on one replica only. If the ranks' answers differed, some would
        # reduce gradients while the others skip the step.
        if getattr(fn, "__qualname__", "") == internals.FINITE_CHECK:
            bad = self._reduce_to(
                tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(result), tf.int32), None, None
            )
            result = tf.equal(bad, 0)
        return result

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, internals.DistributedVariable):
            raise ValueError(
                f"variable '{var.name}' was not made in this strategy's scope. Hint: make models "
                "and optimizers inside of strategy.scope()."
            )
        return self._update_non_slot(var, fn, (var.values[0], *args), kwargs, group)

    def _update_non_slot(self, near: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        args, kwargs = internals.select_replica(0, (tuple(args), kwargs))
        with internals.UpdateContext(0):
            return internals.update_regroup(self, (fn(*args, **kwargs),), group)

    # ---- communication -------------------------------------------------------------------------

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        flat = tf.nest.flatten(value)
        reduced = self._batch_reduce_to(reduce_op, [(leaf, leaf) for leaf in flat], options)
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> list[Any]:
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        found = [_tensor(internals.local(value)) for value, _ in pairs]
        if self._ranks == 1:
            return found
        # The mean of a mirrored variable is its value, bitwise identical on all ranks.
        indices = [
            i for i, (value, _) in enumerate(pairs) if not (mean and internals.is_mirrored(value))
        ]
        reduced = self._collectives.all_reduce_gradients(
            [found[index] for index in indices], "avg" if mean else "sum"
        )
        for index, value in zip(indices, reduced, strict=True):
            found[index] = value
        return found

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, _: Any) -> Any:
        tensor = tf.convert_to_tensor(internals.local(value))
        if tensor.shape.rank == 0:
            raise ValueError("gather: a tensor without axes. Hint: tf.expand_dims(tensor, 0)")
        if self._ranks == 1:
            return tensor
        order = list(range(tensor.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        rows = tensor if order[0] == 0 else tf.transpose(tensor, order)
        (whole,) = self._collectives.all_gather([rows])
        return whole if order[0] == 0 else tf.transpose(whole, order)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return rank 0's value."""
        if isinstance(tensor, (int, float)) or self._ranks == 1:
            return tensor
        tensor = tf.convert_to_tensor(tensor)
        if tensor.dtype in _UNREDUCED:
            return self._collectives.broadcast([tensor], 0)[0]
        # Within steps the operation is faster than a NumPy call.
        return self._collectives.all_reduce([tensor], "sum", 1.0 if self._rank == 0 else 0.0)[0]

    # ---- variables -----------------------------------------------------------------------------

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        kwargs.pop("colocate_with", None)

        def create(**kwargs: Any) -> list[Any]:
            given, dtype = kwargs.pop("initial_value", None), kwargs.get("dtype")
            return [next_creator(initial_value=self._first_value(given, dtype), **kwargs)]

        return internals.mirrored_variable(self._container_strategy(), create, **kwargs)

    def _first_value(self, given: Any, dtype: Any) -> Any:
        """Return rank 0's initial value on all ranks."""

        def value() -> Any:
            tensor = tf.convert_to_tensor(given() if callable(given) else given, dtype=dtype)
            return self._collectives.broadcast([tensor], 0)[0]

        if given is None or self._ranks == 1:
            return given
        if tf.is_tensor(given) and not hasattr(given, "numpy"):
            return value  # a tensor of the graph that is being traced
        with tf.init_scope():
            return value()

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        internals.validate_colocate_distributed_variable(colocate_with_variable, self)

    def read_var(self, v: Any) -> Any:
        """Return the value to save: this rank's, or that of all ranks for ON_READ variables."""
        if internals.is_sync_on_read(v):
            return v._get_cross_replica()
        return tf.identity(v._get())

    def value_container(self, value: Any) -> Any:
        """Return the variable that contains a component."""
        return internals.value_container(value)

    # ---- data ----------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if _caller() == internals.KERAS_TRAINER:
            raise RuntimeError(REFUSED)
        return datasets.distributed(dataset, self._collectives.group)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return dataset_fn(tf.distribute.InputContext(self._ranks, self._rank, self._ranks))

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._rank, self._ranks))

    # ---- replicas and devices ------------------------------------------------------------------

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> int:
        return self._rank

    def _local_results(self, val: Any) -> tuple[Any, ...]:
        return (tf.nest.map_structure(internals.local, val),)

    def _in_multi_worker_mode(self) -> bool:
        return self._ranks > 1

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._ranks

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of this rank."""
        return (self._device,)

    parameter_devices = worker_devices

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the device of this rank."""
        return (self._device,)

    @property
    def experimental_between_graph(self) -> bool:
        """True: every rank has its own graph."""
        return True

    experimental_should_init = experimental_between_graph
    _global_batch_size = experimental_between_graph

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes the shared checkpoint: only rank 0 does."""
        return self._rank == 0

    should_save_summary = should_checkpoint


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _caller() -> str:
    """Return the name of the module that called TensorFlow."""
    frame = sys._getframe(1)
    name = ""
    while frame.f_back is not None:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and not name.startswith("tensorflow."):
            break
    return name
