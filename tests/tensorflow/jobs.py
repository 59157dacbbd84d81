"""What ranks do in the tests of the TensorFlow API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from sdp_plugins.tensorflow import keras as sdp_keras
from sdp_plugins.tensorflow.job import current

WAYS = {
    "eager": lambda function: function,
    "graph": tf.function,
}


@contextmanager
def job() -> Iterator[None]:
    sdp.init()
    try:
        yield
    finally:
        sdp.shutdown()


def names(rank: int, world: int) -> list[str]:
    """What SMDDP's module lacks of what its scripts use."""
    import smdistributed.dataparallel.tensorflow as smddp
    import smdistributed.dataparallel.tensorflow.keras as smddp_keras

    wanted = (
        "init shutdown size rank local_size local_rank allreduce oob_allreduce broadcast "
        "broadcast_variables broadcast_global_variables overlap DistributedGradientTape "
        "DistributedOptimizer BroadcastGlobalVariablesHook Compression ReduceOp get_worker_comm"
    )
    of_keras = "init size rank local_rank Compression DistributedOptimizer callbacks"
    callbacks = "BroadcastGlobalVariablesCallback MetricAverageCallback"
    return [
        name
        for module, text in (
            (smddp, wanted),
            (smddp_keras, of_keras),
            (smddp_keras.callbacks, callbacks),
        )
        for name in text.split()
        if not hasattr(module, name)
    ]


def places(rank: int, world: int) -> tuple[int, ...]:
    with job():
        with pytest.raises(RuntimeError, match=r"init\(\) called more than once"):
            sdp.init()
        return (sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size())


def reductions(rank: int, world: int, way: str) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        mine = tf.range(5, dtype=tf.float32) + float(rank)
        return {
            "average": sdp.allreduce(mine, 0, 3),
            "by name": sdp.allreduce(grad=mine, param_index=2, num_params=3),
            "sum": sdp.oob_allreduce(mine, op=sdp.ReduceOp.SUM),
            "max": sdp.oob_allreduce(mine, op=sdp.ReduceOp.MAX),
            "min": sdp.oob_allreduce(tf.constant(rank), op=sdp.ReduceOp.MIN),
            "half": sdp.oob_allreduce(mine, compression=sdp.Compression.fp16),
            "root": sdp.broadcast(mine, 1),
            "same": sdp.overlap(mine) - mine,
        }

    with job():
        found = WAYS[way](work)()
        return {name: value.numpy() for name, value in found.items()}


def training(rank: int, world: int, way: str) -> list[Any]:
    """Steps by a tape; an embedding's gradient is sparse, and one variable has none."""
    random = np.random.default_rng(7)
    rows = random.integers(0, 6, (4, 6)).astype(np.int64)
    targets = random.normal(size=(4, 6, 3)).astype(np.float32)
    table = tf.Variable(np.full((6, 4), 0.1 * (rank + 1), np.float32))
    kernel = tf.Variable(np.full((4, 3), 0.2 * (rank + 1), np.float32))
    unused = tf.Variable(1.0)
    optimizer = tf.keras.optimizers.SGD(0.1)

    def step(ids: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) @ kernel - target) ** 2)
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [table, kernel, unused])
        assert gradients[2] is None
        optimizer.apply_gradients(zip(gradients[:2], [table, kernel], strict=True))
        return sdp.oob_allreduce(loss)

    compiled = WAYS[way](step)
    with job():
        sdp.broadcast_variables([table, kernel], root_rank=0)
        losses = []
        share = 6 // sdp.size()
        for ids, target in zip(rows, targets, strict=True):
            part = slice(rank * share, (rank + 1) * share)
            losses.append(float(compiled(tf.constant(ids[part]), tf.constant(target[part]))))
        return [losses, table.numpy(), kernel.numpy()]


def first_version(rank: int, world: int) -> list[Any]:
    """A session of TensorFlow 1."""
    with job(), tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("w", initializer=float(rank + 1))
        other = tf.compat.v1.get_variable("v", initializer=float(rank + 5))
        loss = (weight - 3.0 * (rank + 1)) ** 2 + other * (rank + 1.0)
        optimizer = sdp.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.25))
        train = optimizer.minimize(loss)
        hooks = [sdp.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(3):
                session.run(train)
            return session.run([weight, other])


def optimizers_of_keras(rank: int, world: int) -> list[Any]:
    """By both names of what applies gradients, and inside of a loss scale's optimizer."""
    found = []
    with job():
        for scaled in (False, True):
            for name in ("apply", "apply_gradients"):
                weight = tf.Variable([0.0, 0.0])
                optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
                gradient = tf.constant([1.0, 2.0]) * (rank + 1)
                if scaled:
                    optimizer = tf.keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4)
                    gradient *= 4
                if name == "apply":
                    optimizer.apply([gradient], [weight])
                else:
                    optimizer.apply_gradients([(gradient, weight)])
                found.append(weight.numpy().tolist())
    return found


def with_keras(rank: int, world: int) -> dict[str, Any]:
    with job():
        tf.keras.utils.set_random_seed(3 + rank)
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        optimizer = sdp_keras.DistributedOptimizer(
            tf.keras.optimizers.Adam(0.05), compression=sdp_keras.Compression.none
        )
        model.compile(optimizer, "mse")
        x = np.random.default_rng(rank).normal(size=(12, 3)).astype(np.float32)
        history = model.fit(
            x,
            x[:, :2],
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[
                sdp_keras.callbacks.BroadcastGlobalVariablesCallback(0),
                sdp_keras.callbacks.MetricAverageCallback(),
            ],
        )
        return {
            "optimizer": type(optimizer).__name__,
            "loss": history.history["loss"],
            "weights": [w.tolist() for w in model.get_weights()],
        }


def comm(rank: int, world: int) -> list[Any]:
    with job():
        found = sdp.get_worker_comm()
        found.Barrier()
        return [
            found.Get_rank(),
            found.Get_size(),
            found.allgather({"rank": rank}),
            found.gather(rank * "x", root=1),
            found.bcast(rank, root=1),
        ]


def mistakes(rank: int, world: int) -> list[str]:
    texts = []

    def note(call: Any) -> None:
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("none")

    note(sdp.rank)
    with job():
        tape = tf.GradientTape()
        note(lambda: sdp.DistributedGradientTape(tape, device_dense="/gpu:0"))
        note(lambda: sdp.DistributedGradientTape(tape, op=sdp.ReduceOp.SUM))
        note(lambda: sdp.DistributedOptimizer(object()))
        note(lambda: sdp.DistributedOptimizer(tf.keras.optimizers.SGD(), bucket_cap_mb=0.3))
        note(lambda: sdp.allreduce(tf.zeros(1), 3, 3))
        note(lambda: sdp.allreduce(param_index=0, num_params=1))
    return texts


def other_sizes(rank: int, world: int, way: str) -> str:
    """Ranks that reduce other things."""
    with job():
        try:
            WAYS[way](lambda: sdp.oob_allreduce(tf.zeros(3 + rank)))()
        except tf.errors.OpError as error:
            return str(error)
    return "none"


def by_xla(rank: int, world: int) -> str:
    """A function that XLA is to compile with its collective."""
    with job():
        try:
            tf.function(lambda: sdp.oob_allreduce(tf.ones(2)), jit_compile=True)()
        except tf.errors.OpError as error:
            return str(error)
    return "none"


KINDS = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")


def kinds(rank: int, world: int) -> dict[str, Any]:
    """All types, in several fusion buffers, weighted."""
    with job():
        collectives = current.job.collectives

        def work(factor: Any) -> dict[str, Any]:
            numbers = tf.range(130) % 7 + rank
            tensors = [tf.cast(numbers + place, kind) for place in range(3) for kind in KINDS]
            return {
                op: collectives.all_reduce(tensors, op, factor if op in ("sum", "avg") else 1.0)
                for op in ("sum", "avg", "min", "max")
                if op != "avg" or (tensors := [t for t in tensors if t.dtype.is_floating])
            }

        factor = tf.constant(0.5 + rank)
        ways = {way: WAYS[way](work)(factor) for way in WAYS}
        return tf.nest.map_structure(lambda t: tf.cast(t, tf.float64).numpy().tolist(), ways)


def without_rows(rank: int, world: int) -> list[Any]:
    """A rank whose numbers do not count, and are none."""
    with job():
        collectives = current.job.collectives

        @tf.function
        def work(factor: Any) -> Any:
            mine = tf.fill([3], 4.0 if rank == 0 else np.nan)
            return collectives.all_reduce([mine, tf.fill([2], rank + 3)], "sum", factor)

        return [each.numpy().tolist() for each in work(tf.constant(1.0 - rank))]


def in_order(rank: int, world: int) -> list[Any]:
    """Many collectives that do not depend on each other, in branches and loops too."""
    with job():
        rounds = 20

        @tf.function
        def work(x: Any, turned: Any) -> Any:
            parts = [sdp.oob_allreduce(x[: n + 1] * float(n)) for n in range(rounds)]
            low = tf.cond(
                turned,
                lambda: sdp.oob_allreduce(x[:2]) + sdp.oob_allreduce(x[:3])[:2],
                lambda: x[:2],
            )
            for _ in tf.range(3):
                low = sdp.oob_allreduce(low) + 1.0
            sdp.oob_allreduce(x[:5])  # nobody needs it
            return tf.add_n([tf.reduce_sum(part) for part in parts]), low, sdp.oob_allreduce(x)

        x = tf.range(float(rounds)) + float(rank)
        results = [work(x, tf.constant(bool(turn % 2))) for turn in range(4)]
        return tf.nest.map_structure(lambda t: t.numpy().tolist(), results)
