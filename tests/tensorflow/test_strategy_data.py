"""Datasets of the TensorFlow strategy: which rows are each rank's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.keras.first_ranks import on_ranks
from tests.tensorflow.strategies import strategy_of_job

pytestmark = pytest.mark.versions


@on_ranks(3, ["tensorflow"])
def test_each_batch_is_cut(rank: int, world: int) -> None:
    numbers = tf.data.Dataset.range(9)
    with strategy_of_job() as strategy:
        cut = strategy.experimental_distribute_dataset(numbers.batch(4))
        found = [batch.numpy().tolist() for batch in cut]
        assert found == [[[0], [4], []], [[1], [5], []], [[2, 3], [6, 7], [8]]][rank]
        full = strategy.experimental_distribute_dataset(numbers.batch(4, drop_remainder=True))
        assert full.element_spec.shape[0] == [1, 1, 2][rank]
        made = tf.data.Dataset.from_generator(lambda: iter([np.arange(4)]), output_types=tf.int64)
        (unknown,) = strategy.experimental_distribute_dataset(made)
        assert unknown.numpy().tolist() == [[0], [1], [2, 3]][rank]


@on_ranks(2, ["tensorflow"])
def test_a_batch_in_a_tuple_stays_in_it(rank: int, world: int) -> None:
    numbers = tf.data.Dataset.from_tensor_slices((tf.range(2),))
    with strategy_of_job() as strategy:
        (cut,) = strategy.experimental_distribute_dataset(numbers.batch(2))
    assert type(cut) is tuple and cut[0].numpy().tolist() == [rank]


@on_ranks(3, ["tensorflow"])
def test_ragged_and_sparse_rows(rank: int, world: int) -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4]])
    parts = {"d": tf.range(4), "r": ragged, "s": sparse}
    mixed = tf.data.Dataset.from_tensor_slices(parts).batch(4, drop_remainder=True)
    with strategy_of_job() as strategy:
        (cut,) = strategy.experimental_distribute_dataset(mixed)
    assert cut["d"].numpy().tolist() == [[0], [1], [2, 3]][rank]
    assert cut["r"].to_list() == [[[1]], [[2, 3]], [[], [4]]][rank]
    found = tf.sparse.to_dense(cut["s"]).numpy().tolist()
    assert found == [[[0, 1]], [[2, 0]], [[0, 0], [3, 4]]][rank]


@on_ranks(2, ["tensorflow"])
def test_data_of_each_rank(rank: int, world: int) -> None:
    def own(context: Any) -> Any:
        size = context.get_per_replica_batch_size(2 * world)
        numbers = tf.data.Dataset.range(9)
        return numbers.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    with strategy_of_job() as strategy:
        found = [b.numpy().tolist() for b in strategy.distribute_datasets_from_function(own)]
    assert found == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7]]][rank]
