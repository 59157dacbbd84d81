"""The program's own arrays stay as they are while a model trains on them."""

from __future__ import annotations

import os
import subprocess
import sys

# TensorFlow takes aligned arrays of a generator without a copy, and computes in place on a slice of
# one where it believes that nobody else reads it.
PROGRAM = """
import os, sys
from types import SimpleNamespace
import numpy as np
import tensorflow as tf
from sdp_plugins.keras.backends.tensorflow import TensorFlowBackend
from sdp_plugins.keras.backends.tensorflow_data import cut_dataset
from sdp_plugins.keras.batch_shard import DATA
from sdp_plugins.keras.steps import Step
from sdp_plugins.tensorflow.datasets import distributed

def batches():
    return (x[first : first + 6] for first in range(0, 16, 6))

def by_fit(rank):
    return cut_dataset(whole, rank, 3), lambda batch: batch[DATA]

def by_train_step(rank):
    place = SimpleNamespace(rank=rank, world_size=3, exchange=lambda blob: [blob])
    place.backend = TensorFlowBackend.__new__(TensorFlowBackend)
    return whole, lambda batch: Step(SimpleNamespace(metrics=[]), place)._open(batch)[0]

def by_tf_distribute(rank):
    place = SimpleNamespace(rank=rank, world_size=3, exchange=lambda blob: [blob], backend=None)
    return distributed(whole, place), lambda batch: batch

for way in (by_fit, by_train_step, by_tf_distribute):
    memory = np.empty(16 * 96 * 8 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    x = memory[begin : begin + 16 * 96 * 8].view(np.float64).reshape(16, 96)
    x[:] = np.random.default_rng(0).normal(size=x.shape)
    before = x.copy()
    signature = tf.TensorSpec((None, 96), tf.float64)
    whole = tf.data.Dataset.from_generator(batches, output_signature=signature)
    for rank in range(3):
        dataset, rows = way(rank)

        @tf.function
        def step(iterator):
            return tf.reduce_sum(tf.nn.softmax(rows(next(iterator))))

        iterator = iter(dataset)
        for _ in range(3):
            step(iterator)
    changed = [row for row in range(16) if (x[row] != before[row]).any()]
    print(way.__name__, changed, flush=True)
os._exit(0)  # an iterator over a Python generator may not outlive the interpreter
"""


def test_rows_of_a_batch_are_computed_on_in_memory_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.splitlines()[-3:]
    assert found == ["by_fit []", "by_train_step []", "by_tf_distribute []"]
