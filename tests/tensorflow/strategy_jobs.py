"""What ranks do in the tests of the TensorFlow strategy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from sdp_plugins.tensorflow import SMDDPStrategy
from tests.ranks import say

GLOBAL_BATCH = 7
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@contextmanager
def strategy_of_job() -> Iterator[Any]:
    try:
        yield SMDDPStrategy()
    finally:
        sdp.shutdown()


def traced(function: Callable[..., Any], in_graph: bool) -> Callable[..., Any]:
    return tf.function(function) if in_graph else function


def rows_of_training() -> Any:
    """Four batches, of which the last is short: three ranks have 2, 2, 3 and 1, 2, 2 rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(26, 5)).astype(np.float32)
    ids = random.integers(0, 6, (26, 2))
    y = random.normal(size=(26, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, ids, y)).batch(GLOBAL_BATCH)


def build_model() -> Any:
    x, ids = tf.keras.Input((5,)), tf.keras.Input((2,), dtype="int64")
    table = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(6, 3)(ids))
    hidden = tf.keras.layers.Concatenate()([x, table])
    hidden = tf.keras.layers.Dense(8, use_bias=False)(hidden)
    hidden = tf.keras.layers.BatchNormalization(synchronized=True)(hidden)
    return tf.keras.Model([x, ids], tf.keras.layers.Dense(3)(tf.keras.activations.tanh(hidden)))


def training(rank: int, world: int, in_graph: bool) -> dict[str, Any]:
    """TensorFlow's guide to custom training: a global loss, metrics, a loop over batches."""
    tf.keras.utils.set_random_seed(1 if world == 1 else 1 + rank)
    with strategy_of_job() as strategy:
        with strategy.scope():
            model = build_model()
            optimizer = tf.keras.optimizers.AdamW(0.05, weight_decay=0.02)
            seen = tf.keras.metrics.Mean()
        data = strategy.experimental_distribute_dataset(rows_of_training())

        def step(x: Any, ids: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                each = tf.reduce_mean((model([x, ids], training=True) - target) ** 2, axis=-1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=GLOBAL_BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            if loss > -1.0:  # a conditional that autograph has to convert
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            seen.update_state(each)
            return loss

        def train(batch: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

        compiled = traced(train, in_graph)
        losses = [float(compiled(batch)) for _ in range(2) for batch in data]
        return {
            "losses": losses,
            "metric": float(seen.result()),
            "weights": model.get_weights(),
            "iterations": int(optimizer.iterations.numpy()),
        }


def reductions(rank: int, world: int, in_graph: bool) -> dict[str, Any]:
    """Ranks have one row more than the one before."""
    with strategy_of_job() as strategy:
        rows = tf.reshape(tf.range(2.0 * (rank + 1)), [rank + 1, 2]) + 10.0 * rank

        def in_replica() -> dict[str, Any]:
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32)

            def merged(strategy: Any, value: Any) -> Any:
                assert tf.distribute.in_cross_replica_context()
                return strategy.extended.reduce_to(SUM, value, destinations=value)

            return {
                "id": number,
                "sum": context.all_reduce(SUM, number + 1.0),
                "mean": context.all_reduce("MEAN", {"a": number, "b": [number * 2]})["b"][0],
                "rows": context.all_gather(rows, axis=0),
                "columns": context.all_gather(tf.transpose(rows), axis=1),
                "merged": context.merge_call(merged, args=(number,)),
                "sparse": tf.convert_to_tensor(
                    context.all_reduce(SUM, tf.IndexedSlices(rows, tf.range(rank + 1), [world, 2]))
                ),
            }

        def across() -> dict[str, Any]:
            found = strategy.run(in_replica)
            number = found.pop("id")
            return {
                **found,
                "reduced": strategy.reduce(SUM, number, axis=None),
                "average": strategy.reduce("mean", number, axis=None),
                "sum of rows": strategy.reduce("SUM", rows, axis=0),
                "mean of rows": strategy.reduce("MEAN", rows, axis=0),
                "whole numbers": strategy.reduce("SUM", tf.constant(rank + 1), axis=None),
                "gathered": strategy.gather(rows, axis=0),
                "several": tf.stack(
                    strategy.extended.batch_reduce_to(SUM, [(number, None), (2 * number, None)])
                ),
            }

        found = traced(across, in_graph)()
        assert strategy.num_replicas_in_sync == world
        (mine,) = strategy.experimental_local_results(found["sum"])
        own = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(context.replica_id_in_sync_group)
        )
        task = strategy.cluster_resolver
        return {
            **{name: value.numpy() for name, value in found.items()},
            "local": float(mine),
            "own": int(own),
            "task": (task.task_type, task.task_id, task.cluster_spec().num_tasks("worker")),
        }


def variables(rank: int, world: int, in_graph: bool) -> dict[str, Any]:
    def make(aggregation: str, on_read: bool = False) -> Any:
        when = tf.VariableSynchronization.ON_READ if on_read else tf.VariableSynchronization.AUTO
        kind = getattr(tf.VariableAggregation, aggregation)
        return tf.Variable(5.0 + rank, synchronization=when, aggregation=kind)

    with strategy_of_job() as strategy:
        outside = tf.Variable(1.0)
        with strategy.scope():
            made = {
                "sum": make("SUM"),
                "mean": make("MEAN"),
                "first": make("ONLY_FIRST_REPLICA"),
                "read sum": make("SUM", on_read=True),
                "read mean": make("MEAN", on_read=True),
            }
            plain = tf.Variable(lambda: tf.fill([2], rank + 3))
        before = {name: float(variable.numpy()) for name, variable in made.items()}
        late: list[Any] = []

        def step() -> Any:
            if not late:  # as layers do that are built in the first step
                late.append(tf.Variable(lambda: tf.constant([rank + 8.0])))
            for variable in made.values():
                variable.assign(tf.constant(rank + 1.0))
            made["read mean"].assign_add(1.0)
            return made["read mean"] + 0.0

        def update(strategy: Any) -> Any:
            return strategy.extended.update(plain, lambda v, by: v.assign_add(by), args=([1, 2],))

        local = traced(lambda: strategy.run(step), in_graph)()
        strategy.run(lambda: tf.distribute.get_replica_context().merge_call(update))
        owns = strategy.extended.variable_created_in_scope
        return {
            "before": before,
            "after": {name: float(variable.numpy()) for name, variable in made.items()},
            "local": float(local),
            "plain": plain.numpy().tolist(),
            "late": late[0].numpy().tolist(),
            "owns": [owns(plain), owns(late[0]), owns(outside)],
        }


def gradients(rank: int, world: int, in_graph: bool) -> dict[str, Any]:
    """Of sum over ranks of (rank + 1) * (sum of x)^2 and so on."""
    with strategy_of_job() as strategy:
        x = tf.constant([1.0 + rank, 2.0])

        def step() -> dict[str, Any]:
            context = tf.distribute.get_replica_context()
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                total = context.all_reduce(SUM, x)
                mean = context.all_reduce(MEAN, x)
                whole = context.all_gather(x, axis=0)
                of_sum = (rank + 1.0) * tf.reduce_sum(total**2)
                of_mean = (rank + 1.0) * tf.reduce_sum(mean**2)
                of_whole = (rank + 1.0) * tf.reduce_sum(whole**2)
            return {
                "sum": tape.gradient(of_sum, x),
                "mean": tape.gradient(of_mean, x),
                "gather": tape.gradient(of_whole, x),
            }

        found = traced(lambda: strategy.run(step), in_graph)()
        return {name: value.numpy() for name, value in found.items()}


def overflow(rank: int, world: int) -> dict[str, Any]:
    """Half of the steps overflow, on the last rank only: all skip them, and halve their scales."""
    with strategy_of_job() as strategy:
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0])
            optimizer = tf.keras.optimizers.LossScaleOptimizer(
                tf.keras.optimizers.SGD(0.5), initial_scale=8.0
            )

        def step(number: Any) -> None:
            last = rank == world - 1
            value = tf.where((number % 2 == 1) & last, np.float32(np.inf), 1.0)
            gradient = tf.stack([value, 2.0]) * optimizer.scale_loss(1.0)
            optimizer.apply_gradients([(gradient, weight)])

        compiled = tf.function(lambda number: strategy.run(step, args=(number,)))
        for number in range(4):
            compiled(tf.constant(number))
        return {
            "weight": weight.numpy().tolist(),
            "scale": float(optimizer.dynamic_scale.numpy()),
            "iterations": int(optimizer.iterations.numpy()),
        }


def data(rank: int, world: int) -> dict[str, Any]:
    with strategy_of_job() as strategy:
        numbers = tf.data.Dataset.range(9)
        cut = strategy.experimental_distribute_dataset(numbers.batch(4))
        full = strategy.experimental_distribute_dataset(numbers.batch(4, drop_remainder=True))
        ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
        sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4]])
        parts = {"d": tf.range(4), "r": ragged, "s": sparse}
        mixed = tf.data.Dataset.from_tensor_slices(parts).batch(4, drop_remainder=True)
        (other,) = strategy.experimental_distribute_dataset(mixed)
        made = tf.data.Dataset.from_generator(lambda: iter([np.arange(4)]), output_types=tf.int64)
        (unknown,) = strategy.experimental_distribute_dataset(made)

        def own(context: Any) -> Any:
            size = context.get_per_replica_batch_size(2 * world)
            shard = numbers.shard(context.num_input_pipelines, context.input_pipeline_id)
            return shard.batch(size)

        return {
            "cut": [batch.numpy().tolist() for batch in cut],
            "static": full.element_spec.shape[0],
            "unknown": unknown.numpy().tolist(),
            "ragged": other["r"].to_list(),
            "sparse": tf.sparse.to_dense(other["s"]).numpy().tolist(),
            "own": [b.numpy().tolist() for b in strategy.distribute_datasets_from_function(own)],
        }


def mistakes(rank: int, world: int) -> dict[str, str]:
    texts = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            texts[name] = f"{type(error).__name__}: {error}"
        else:
            texts[name] = "none"

    def nested(other: Any) -> None:
        with strategy.scope(), other.scope():
            pass

    def train(variable: Any) -> Any:
        optimizer.apply_gradients([(tf.ones([1, 1]), variable)])

    with strategy_of_job() as strategy:
        numbers = tf.data.Dataset.range(8)
        foreign = tf.Variable([[1.0]])
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
            optimizer = tf.keras.optimizers.SGD()
            model.compile("sgd", "mse")
        x = np.zeros((4, 1), np.float32)
        distribute = strategy.experimental_distribute_dataset
        note("fit", lambda: model.fit(x, x, verbose=0))
        note("evaluate", lambda: model.evaluate(x, x, verbose=0))
        note("predict", lambda: model.predict(x, verbose=0))
        note("train_on_batch", lambda: model.train_on_batch(x, x))
        note("nested", lambda: nested(tf.distribute.OneDeviceStrategy("/cpu:0")))
        note("in run", lambda: strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None)))
        note("run in run", lambda: strategy.run(lambda: strategy.run(lambda: None)))
        note("foreign", lambda: strategy.run(train, args=(foreign,)))
        note("update", lambda: strategy.extended.update(foreign, lambda variable: variable + 1))
        note("scalar", lambda: strategy.gather(tf.constant(1.0), axis=0))
        note("unbatched", lambda: distribute(numbers))
        note("array", lambda: distribute(x))
        note("shuffled", lambda: distribute(numbers.shuffle(8, seed=rank + 1).batch(8)))
        note("group", lambda: SMDDPStrategy(group=object()))  # type: ignore[arg-type]
    return texts


def checkpoints(rank: int, world: int, folder: str) -> dict[str, Any]:
    """As TensorFlow's guide has it: all ranks save, and only rank 0's file is kept."""
    with strategy_of_job() as strategy:

        def make() -> Any:
            with strategy.scope():
                seen = tf.Variable(
                    0.0,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                weight = tf.Variable([0.0, 0.0])
                optimizer = tf.keras.optimizers.Adam(0.5)
                optimizer.build([weight])
            return weight, seen, optimizer

        def step() -> None:
            optimizer.apply_gradients([(tf.constant([1.0, rank + 1.0]), weight)])
            seen.assign_add(rank + 1.0)

        weight, seen, optimizer = make()
        strategy.run(step)
        main = strategy.extended.should_checkpoint
        path = Path(folder) / ("kept" if main else f"thrown-away-{rank}")
        saved = tf.train.Checkpoint(w=weight, s=seen, o=optimizer)
        tf.train.CheckpointManager(saved, str(path), max_to_keep=1).save()
        sdp.get_worker_comm().Barrier()

        weight, seen, optimizer = make()
        again = tf.train.Checkpoint(w=weight, s=seen, o=optimizer)
        again.restore(tf.train.latest_checkpoint(str(Path(folder) / "kept"))).assert_consumed()
        restored = weight.numpy().tolist()
        strategy.run(step)
        return {
            "main": main,
            "restored": restored,
            "seen": float(seen.numpy()),
            "iterations": int(optimizer.iterations.numpy()),
            "weight": weight.numpy().tolist(),
        }


def loses_a_rank(rank: int, world: int) -> str:
    with strategy_of_job() as strategy:
        step = tf.function(lambda: strategy.reduce("SUM", strategy.run(tf.ones, ([3],)), None))
        step()
        if rank == 1:
            say("in the middle")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step()
        except tf.errors.OpError as error:
            return str(error)
    return "none"


def other_layers(rank: int, world: int) -> str:
    with strategy_of_job() as strategy:
        try:
            with strategy.scope():
                tf.Variable(tf.zeros([3 + rank]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "none"
