"""SMDDP's TensorFlow API: every name, eagerly and in graphs."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from sdp_plugins.tensorflow import keras as sdp_keras
from sdp_plugins.tensorflow import operations
from sdp_plugins.tensorflow.job import current
from tests.keras.first_ranks import FirstRanks, on_ranks

WAYS: dict[str, Callable[..., Any]] = {"eager": lambda function: function, "graph": tf.function}
ways = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.versions


@contextmanager
def job() -> Iterator[None]:
    sdp.init()
    try:
        yield
    finally:
        sdp.shutdown()


@on_ranks(1, ["tensorflow"])
def test_names_of_smddp(rank: int, world: int) -> None:
    """Of its module, what its scripts use."""
    import smdistributed.dataparallel.tensorflow as smddp
    import smdistributed.dataparallel.tensorflow.keras as smddp_keras

    wanted = (
        "init shutdown size rank local_size local_rank allreduce oob_allreduce broadcast "
        "broadcast_variables broadcast_global_variables overlap DistributedGradientTape "
        "DistributedOptimizer BroadcastGlobalVariablesHook Compression ReduceOp get_worker_comm"
    )
    of_keras = "init size rank local_rank Compression DistributedOptimizer callbacks"
    callbacks = "BroadcastGlobalVariablesCallback MetricAverageCallback"
    modules = ((smddp, wanted), (smddp_keras, of_keras), (smddp_keras.callbacks, callbacks))
    missing = [n for module, text in modules for n in text.split() if not hasattr(module, n)]
    assert missing == []


@on_ranks(2, ["tensorflow"])
def test_places(rank: int, world: int) -> None:
    with job():
        with pytest.raises(RuntimeError, match=r"init\(\) called more than once"):
            sdp.init()
        assert (sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size()) == (rank, 2, rank, 2)


# ---- collectives -----------------------------------------------------------------------------


@ways
@on_ranks(2, ["tensorflow"])
def test_reductions(rank: int, world: int, way: str) -> None:
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

    base = np.arange(5)
    expected = {
        "average": base + 0.5,
        "by name": base + 0.5,
        "sum": 2 * base + 1,
        "max": base + 1,
        "min": np.array(0),
        "half": base + 0.5,
        "root": base + 1,
        "same": 0 * base,
    }
    with job():
        found = WAYS[way](work)()
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


KINDS = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
SMALL_BUFFERS = {"SDP_FUSION_MB": "0.0010986328125"}  # 1152 bytes


@on_ranks(2, ["tensorflow"], SMALL_BUFFERS)
def test_all_types_in_several_buffers(rank: int, world: int) -> Any:
    """Weighted."""
    with job():
        collectives = current.collectives

        def work(factor: Any) -> dict[str, Any]:
            numbers = tf.range(130) % 7 + rank
            tensors = [tf.cast(numbers + place, kind) for place in range(3) for kind in KINDS]
            return {
                op: collectives.all_reduce(tensors, op, factor if op in ("sum", "avg") else 1.0)
                for op in ("sum", "avg", "min", "max")
                if op != "avg" or (tensors := [t for t in tensors if t.dtype.is_floating])
            }

        factor = tf.constant(0.5 + rank)
        made = {way: WAYS[way](work)(factor) for way in WAYS}
        collectives._endpoint = None
        made["NumPy"] = work(factor)
    found = tf.nest.map_structure(lambda t: tf.cast(t, tf.float64).numpy().tolist(), made)
    assert found["eager"] == found["graph"] == found["NumPy"]
    np.testing.assert_array_equal(found["graph"]["avg"][2], np.arange(130) % 7 + 0.75)
    return found


@on_ranks(2, ["tensorflow"])
def test_unknown_sizes_do_not_divide_buffers(rank: int, world: int) -> None:
    with job():
        collectives = current.collectives
        unknown, known = tf.TensorSpec([None]), tf.TensorSpec([3])
        work = tf.function(
            lambda *tensors: collectives.all_reduce(tensors, "sum"),
            input_signature=[known, unknown, known, unknown, known],
        )
        graph = work.get_concrete_function().graph
        assert [op.type for op in graph.get_operations()].count("SdpAllReduce") == 3
        mine = [tf.fill([3 + place % 2], float(rank + place)) for place in range(5)]
        found = [each.numpy().tolist() for each in work(*mine)]
    assert found == [[1.0 + 2 * place] * (3 + place % 2) for place in range(5)]


@on_ranks(2, ["tensorflow"])
def test_a_rank_without_rows_has_zeros(rank: int, world: int) -> None:
    """Its numbers do not count, and are none."""
    with job():
        collectives = current.collectives

        @tf.function
        def work(factor: Any) -> Any:
            mine = tf.fill([3], 4.0 if rank == 0 else np.nan)
            return collectives.all_reduce([mine, tf.fill([2], rank + 3)], "sum", factor)

        found = [each.numpy().tolist() for each in work(tf.constant(1.0 - rank))]
    assert found == [[4.0] * 3, [3, 3]]


def in_order(rank: int, world: int) -> Any:
    """Many collectives that do not depend on each other, in branches and loops too."""
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

    with job():
        x = tf.range(float(rounds)) + float(rank)
        results = [work(x, tf.constant(bool(turn % 2))) for turn in range(4)]
    mean = (world - 1) / 2
    sums = sum(n * (sum(range(n + 1)) + mean * (n + 1)) for n in range(rounds))
    for turn, (total, low, whole) in enumerate(results):
        np.testing.assert_allclose(total, sums, rtol=1e-6)
        both = 2.0 if turn % 2 else 1.0
        np.testing.assert_allclose(low, both * (np.arange(2) + mean) + 3, rtol=1e-6)
        np.testing.assert_allclose(whole, np.arange(rounds) + mean, rtol=1e-6)
    return tf.nest.map_structure(lambda t: t.numpy().tolist(), results)


@on_ranks(2, ["tensorflow"])
def test_one_order_on_two_ranks(rank: int, world: int) -> Any:
    return in_order(rank, world)


@on_ranks(3, ["tensorflow"])
def test_one_order_on_three_ranks(rank: int, world: int) -> Any:
    return in_order(rank, world)


@on_ranks(2, ["tensorflow"])
def test_worker_comm(rank: int, world: int) -> None:
    with job():
        comm = sdp.get_worker_comm()
        comm.Barrier()
        assert (comm.Get_rank(), comm.Get_size()) == (rank, 2)
        assert comm.allgather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        assert comm.gather(rank * "x", root=1) == (["", "x"] if rank == 1 else None)
        assert comm.bcast(rank, root=1) == 1


# ---- training --------------------------------------------------------------------------------


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


@ways
def test_training_equals_one_rank(ranks: Callable[[int], FirstRanks], way: str) -> None:
    (alone,) = ranks(1).run(training, way)
    first, second = ranks(2).run(training, way)
    for one, other, single in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, single, rtol=1e-5, atol=1e-6)


@on_ranks(2, ["tensorflow"])
def test_first_version(rank: int, world: int) -> list[Any]:
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
            found = session.run([weight, other])
    # The averaged loss of `w` has its least at 4.5; of `v` the slope is 1.5.
    np.testing.assert_allclose(found, [4.5 - 3.5 / 8, 5 - 3 * 0.25 * 1.5], rtol=1e-6)
    return found


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["apply", "apply_gradients"])
@on_ranks(2, ["tensorflow"])
def test_optimizers_of_keras(rank: int, world: int, scaled: bool, name: str) -> None:
    """By both names of what applies gradients, and inside of a loss scale's optimizer."""
    with job():
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
        assert weight.numpy().tolist() == [-1.5, -3.0]


@on_ranks(2, ["tensorflow"])
def test_an_optimizer_keeps_its_state_and_settings(rank: int, world: int) -> None:
    class Shifted(tf.keras.optimizers.SGD):  # type: ignore[misc]
        def __init__(self, shift: float) -> None:
            super().__init__(lambda: 1.0 + shift)

    with job():
        weight = tf.Variable([0.0])
        optimizer = Shifted(1.0)
        optimizer.apply([tf.constant([1.0])], [weight])
        optimizer = sdp.DistributedOptimizer(optimizer)
        optimizer.apply([tf.constant([2.0 * rank])], [weight])
        assert (weight.numpy().item(), int(optimizer.iterations)) == (-4.0, 2)


@on_ranks(2, ["tensorflow"])
def test_an_optimizer_that_is_made_distributed_again_averages_once(rank: int, world: int) -> None:
    with job():
        weight = tf.Variable([0.0])
        optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
        optimizer = sdp.DistributedOptimizer(optimizer)
        before = current.collectives.group.issued
        optimizer.apply([tf.constant([2.0 * rank])], [weight])
        assert current.collectives.group.issued == before + 1
        assert weight.numpy().tolist() == [-1.0]


@on_ranks(2, ["tensorflow"])
def test_sparse_gradients_that_become_dense_need_not_be_sparse_everywhere(
    rank: int, world: int
) -> None:
    with job():
        weight = tf.Variable([[1.0], [2.0]])
        with sdp.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.gather(weight, [0, 1]) if rank == 0 else weight)
        before = current.collectives.group.issued
        assert tape.gradient(loss, weight).numpy().tolist() == [[1.0], [1.0]]
        assert current.collectives.group.issued == before + 1


@on_ranks(2, ["tensorflow"])
def test_types_that_the_operation_lacks(rank: int, world: int) -> None:
    with job():
        total = sdp.oob_allreduce(tf.constant([1.0 + 2.0j]), op=sdp.ReduceOp.SUM)
        some = sdp.oob_allreduce(tf.constant([rank == 0, False]), op=sdp.ReduceOp.MAX)
        assert (total.numpy().tolist(), some.numpy().tolist()) == ([2 + 4j], [True, False])


@on_ranks(2, ["tensorflow"])
def test_an_overflow_of_one_rank_skips_the_step_of_all(rank: int, world: int) -> None:
    """Of a loss scale's optimizer around it, which ``compile`` makes for float16."""
    with job():
        weight = tf.Variable([0.0])
        inner = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
        optimizer = tf.keras.optimizers.LossScaleOptimizer(inner, initial_scale=4)
        optimizer.apply([tf.constant([np.inf if rank == 1 else 4.0])], [weight])
        optimizer.apply([tf.constant([4.0 * rank])], [weight])
        assert (weight.numpy().item(), float(optimizer.dynamic_scale)) == (-1.0, 2.0)


@on_ranks(2, ["tensorflow"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_other_variables_are_not_averaged(
    rank: int, world: int, compiled: bool, sparse: bool
) -> None:
    with job():
        weights = [tf.Variable([[1.0], [2.0]]) for _ in range(2)]

        def gradients() -> Any:
            with sdp.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=False) as tape:
                mine = weights[rank]
                loss = tf.reduce_sum(tf.gather(mine, [1]) if sparse else mine)
            return tape.gradient(loss, weights)

        with pytest.raises(Exception, match=r"gradients: ranks disagree: rank 0: gradient 0 is "):
            (tf.function(gradients) if compiled else gradients)()


@on_ranks(2, ["tensorflow"])
def test_keras_in_horovods_way(rank: int, world: int) -> Any:
    with job():
        tf.keras.utils.set_random_seed(3 + rank)
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        optimizer = sdp_keras.DistributedOptimizer(
            tf.keras.optimizers.Adam(0.05), compression=sdp_keras.Compression.none
        )
        assert type(optimizer).__name__ == "Adam"
        model.compile(optimizer, "mse")
        x = np.random.default_rng(rank).normal(size=(12, 3)).astype(np.float32)
        callbacks = [
            sdp_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            sdp_keras.callbacks.MetricAverageCallback(),
        ]
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, x[:, :2], callbacks=callbacks, **options)
        return history.history["loss"], model.get_weights()


# ---- mistakes --------------------------------------------------------------------------------


@on_ranks(2, ["tensorflow"])
def test_mistakes(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        sdp.rank()
    assert str(caught.value) == "this needs a job. Hint: call init() first."
    tape, tape_of, sgd = tf.GradientTape(), sdp.DistributedGradientTape, tf.keras.optimizers.SGD
    with job():
        with pytest.raises(ValueError, match="device_dense is not supported"):
            tape_of(tape, device_dense="/gpu:0")
        with pytest.raises(ValueError, match=r"op must be ReduceOp\.AVERAGE"):
            tape_of(tape, op=sdp.ReduceOp.SUM)
        with pytest.raises(TypeError, match=r"^object is not an optimizer"):
            sdp.DistributedOptimizer(object())
        with pytest.raises(ValueError, match="a multiple of 128 bytes"):
            sdp.DistributedOptimizer(sgd(), bucket_cap_mb=0.3)
        with pytest.raises(ValueError, match="there is no tensor 3 of 3"):
            sdp.allreduce(tf.zeros(1), 3, 3)
        with pytest.raises((TypeError, ValueError), match="give the gradient"):
            sdp.allreduce(param_index=0, num_params=1)


@ways
@on_ranks(2, ["tensorflow"])
def test_a_mismatch_is_named(rank: int, world: int, way: str) -> None:
    with job(), pytest.raises(tf.errors.OpError) as caught:
        WAYS[way](lambda: sdp.oob_allreduce(tf.zeros(3 + rank)))()
    for part in ("ranks disagree", "float32[3]", "float32[4]"):
        assert part in str(caught.value)


@on_ranks(2, ["tensorflow"])
def test_xla_is_refused(rank: int, world: int) -> None:
    """Where it is to compile a function with its collective."""
    with job(), pytest.raises(tf.errors.OpError, match="SdpAllReduce"):
        tf.function(lambda: sdp.oob_allreduce(tf.ones(2)), jit_compile=True)()


def compiled_ahead() -> tuple[str, int]:
    """What `python -m sdp_plugins.tensorflow` prints, and its status."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as output:
        patch.setattr(sys, "argv", ["__main__.py"])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("sdp_plugins.tensorflow", run_name="__main__")
    signal.signal(signal.SIGTERM, handler)
    return output.getvalue(), int(caught.value.code or 0)


@on_ranks(1, ["tensorflow"])
def test_compiled_ahead(rank: int, world: int) -> None:
    assert compiled_ahead() == ("all_reduce: compiled\n", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDP_NATIVE_OPS", "0")
        patch.setattr(operations, "all_reduce", operations.all_reduce.__wrapped__)
        assert compiled_ahead() == ("all_reduce: not compiled: SDP_NATIVE_OPS is 0\n", 1)


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "all_reduce_op.so"
    library.write_text("of another compiler")
    monkeypatch.setattr(operations.native_build, "build", lambda *arguments: library)
    with pytest.raises(operations.CompileError, match=f"Hint: delete {library}"):
        operations.all_reduce.__wrapped__()
