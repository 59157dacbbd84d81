"""The TensorFlow strategy: its collectives and variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from sdp_plugins.core import Group
from sdp_plugins.tensorflow import operations
from sdp_plugins.tensorflow.collectives import TensorFlowCollectives
from tests.faults import die
from tests.keras.first_ranks import FirstRanks, on_ranks
from tests.tensorflow.strategies import MEAN, SUM, modes, strategy_of_job, traced

pytestmark = pytest.mark.versions

ROWS = [np.arange(2.0 * (rank + 1)).reshape(-1, 2) + 10 * rank for rank in range(3)]
WHOLE = np.concatenate(ROWS)
REDUCED = {
    "sum": 6,
    "mean": 2,
    "rows": WHOLE,
    "columns": WHOLE.T,
    "merged": 3,
    "sparse": sum(np.pad(part, [(0, 3 - len(part)), (0, 0)]) for part in ROWS),
    "reduced": 3,
    "average": 1,
    "sum of rows": WHOLE.sum(axis=0),
    "mean of rows": WHOLE.mean(axis=0),
    "whole numbers": 6,
    "gathered": WHOLE,
    "several": [3, 6],
}
"""Of three ranks, of which each has one row more than the one before."""


def in_replica(rows: Any, rank: int, world: int) -> dict[str, Any]:
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


@modes
@on_ranks(3, ["tensorflow"])
def test_reductions(rank: int, world: int, in_graph: bool) -> None:
    """Ranks have one row more than the one before."""
    with strategy_of_job() as strategy:
        rows = tf.reshape(tf.range(2.0 * (rank + 1)), [rank + 1, 2]) + 10.0 * rank

        def across() -> dict[str, Any]:
            found = strategy.run(lambda: in_replica(rows, rank, world))
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
        assert float(mine) == 6
    assert sorted(found) == sorted(REDUCED)
    for name, value in REDUCED.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@modes
@pytest.mark.parametrize("native", [False, True])
@on_ranks(2, ["tensorflow"])
def test_float64_keeps_its_precision(rank: int, world: int, native: bool, in_graph: bool) -> None:
    """The factor is applied in float64, also to slices."""
    weight = 6 / 7
    with Group.from_env() as group, pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setenv("SDP_NATIVE_OPS", "0")
            patch.setattr(operations, "all_reduce", operations.all_reduce.__wrapped__)  # uncached
        collectives = TensorFlowCollectives(group)
        assert (collectives._endpoint is not None) is native

        def reduce() -> list[Any]:
            values = tf.constant([1.0, 3.0], tf.float64)
            slices = tf.IndexedSlices(values, tf.range(2), [2])
            return [
                tf.convert_to_tensor(found)
                for given in (weight, tf.constant(weight, tf.float64))
                for found in collectives.all_reduce_gradients([values, slices], "sum", given)
            ]

        for found in traced(reduce, in_graph)():
            np.testing.assert_allclose(found, [world * weight, 3 * world * weight], rtol=1e-15)


@on_ranks(3, ["tensorflow"])
def test_places(rank: int, world: int) -> None:
    with strategy_of_job() as strategy:
        own = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(context.replica_id_in_sync_group)
        )
        assert int(own) == rank
        task = strategy.cluster_resolver
        assert (task.task_type, task.task_id) == ("worker", rank)
        assert task.cluster_spec().num_tasks("worker") == 3


def variable_of(rank: int, aggregation: str, on_read: bool = False) -> Any:
    when = tf.VariableSynchronization.ON_READ if on_read else tf.VariableSynchronization.AUTO
    kind = getattr(tf.VariableAggregation, aggregation)
    return tf.Variable(5.0 + rank, synchronization=when, aggregation=kind)


@modes
@on_ranks(2, ["tensorflow"])
def test_variables(rank: int, world: int, in_graph: bool) -> None:
    with strategy_of_job() as strategy:
        outside = tf.Variable(1.0)
        with strategy.scope():
            made = {
                "sum": variable_of(rank, "SUM"),
                "mean": variable_of(rank, "MEAN"),
                "first": variable_of(rank, "ONLY_FIRST_REPLICA"),
                "read sum": variable_of(rank, "SUM", on_read=True),
                "read mean": variable_of(rank, "MEAN", on_read=True),
            }
            plain = tf.Variable(lambda: tf.fill([2], rank + 3))
        before = {name: float(variable.numpy()) for name, variable in made.items()}
        assert before == {"sum": 5, "mean": 5, "first": 5, "read sum": 10, "read mean": 5}
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
        after = {name: float(variable.numpy()) for name, variable in made.items()}
        assert after == {"sum": 3, "mean": 1.5, "first": 1, "read sum": 3, "read mean": 2.5}
        assert float(local) == rank + 2
        assert plain.numpy().tolist() == [4, 5]
        assert late[0].numpy().tolist() == [8]
        assert [owns(plain), owns(late[0]), owns(outside)] == [True, True, False]


@modes
@on_ranks(2, ["tensorflow"])
def test_gradients_of_collectives(rank: int, world: int, in_graph: bool) -> None:
    """The loss is 1 + 2 times a sum of squares, whichever rank's values are changed."""
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
    np.testing.assert_allclose(found["sum"], 3 * 2 * np.array([3, 4]))
    np.testing.assert_allclose(found["mean"], 3 * np.array([1.5, 2]))
    np.testing.assert_allclose(found["gather"], 3 * 2 * np.array([1 + rank, 2]))


def loses_a_rank(rank: int, world: int) -> str:
    with strategy_of_job() as strategy:
        step = tf.function(lambda: strategy.reduce("SUM", strategy.run(tf.ones, ([3],)), None))
        step()
        if rank == 1:
            die("in the middle")
        with pytest.raises(tf.errors.OpError) as caught:
            step()
        return str(caught.value)


def test_a_lost_rank_is_named(ranks: Callable[[int], FirstRanks]) -> None:
    with ranks(2).start(loses_a_rank) as job:
        assert job[1].heard() == "in the middle"
        text = job[0].result()
    assert "rank 1" in text


@on_ranks(2, ["tensorflow"])
def test_other_variables_are_named(rank: int, world: int) -> None:
    disagree = pytest.raises(Exception, match="ranks disagree")
    with strategy_of_job() as strategy, disagree, strategy.scope():
        tf.Variable(tf.zeros([3 + rank]))
