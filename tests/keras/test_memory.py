"""The program's own arrays stay as they are while a model trains on them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# TensorFlow takes aligned arrays of a generator without a copy, and computes in place on a slice of
# one where it believes that nobody else reads it.
PROGRAM = """
import os
from types import SimpleNamespace
import numpy as np
import tensorflow as tf
{imports}

memory = np.empty(16 * 96 * 8 + 64, np.uint8)
begin = -memory.ctypes.data % 64
x = memory[begin : begin + 16 * 96 * 8].view(np.float64).reshape(16, 96)
x[:] = np.random.default_rng(0).normal(size=x.shape)
before = x.copy()

def batches():
    return (x[first : first + 6] for first in range(0, 16, 6))

signature = tf.TensorSpec((None, 96), tf.float64)
whole = tf.data.Dataset.from_generator(batches, output_signature=signature)

for rank in range(3):
    place = SimpleNamespace(rank=rank, world_size=3, exchange=lambda blob: [blob])
    place.backend = {backend}
    dataset = {dataset}

    @tf.function
    def step(iterator):
        return tf.reduce_sum(tf.nn.softmax({rows}))

    iterator = iter(dataset)
    for _ in range(3):
        step(iterator)
print([row for row in range(16) if (x[row] != before[row]).any()], flush=True)
os._exit(0)  # an iterator over a Python generator may not outlive the interpreter
"""
WAYS = {
    "fit": {
        "imports": "from sdp_plugins.keras.backends.tensorflow_data import cut_dataset\n"
        "from sdp_plugins.keras.batch_shard import DATA",
        "dataset": "cut_dataset(whole, rank, 3)",
        "rows": "next(iterator)[DATA]",
    },
    "train_step": {
        "imports": "from sdp_plugins.keras.backends.tensorflow import TensorFlowBackend\n"
        "from sdp_plugins.keras.steps import Step",
        "backend": "TensorFlowBackend.__new__(TensorFlowBackend)",
        "dataset": "whole",
        "rows": "Step(SimpleNamespace(metrics=[]), place)._open(next(iterator))[0]",
    },
    "tf.distribute": {
        "imports": "from sdp_plugins.tensorflow.datasets import distributed",
        "dataset": "distributed(whole, place)",
        "rows": "next(iterator)",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_batch_are_computed_on_in_memory_of_their_own(way: str) -> None:
    program = PROGRAM.format(**{"backend": "None", **WAYS[way]})
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
