"""The program's own arrays stay as they are while a model trains on them."""

from __future__ import annotations

import os
import subprocess
import sys

# TensorFlow takes aligned arrays of a generator without a copy, and computes in place on a slice of
# one where it believes that nobody else reads it.
PROGRAM = """
import os
import numpy as np
import tensorflow as tf
from sdp_plugins.keras.backends.tensorflow import cut_dataset
from sdp_plugins.keras.batch_shard import DATA

memory = np.empty(16 * 96 * 8 + 64, np.uint8)
begin = -memory.ctypes.data % 64
x = memory[begin : begin + 16 * 96 * 8].view(np.float64).reshape(16, 96)
x[:] = np.random.default_rng(0).normal(size=x.shape)
before = x.copy()

def batches():
    return (x[first : first + 6] for first in range(0, 16, 6))

signature = tf.TensorSpec((None, 96), tf.float64)
dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)

@tf.function
def step(iterator):
    return tf.reduce_sum(tf.nn.softmax(next(iterator)[DATA]))

for rank in range(3):
    iterator = iter(cut_dataset(dataset, rank, 3))
    for _ in range(3):
        step(iterator)
print([row for row in range(16) if (x[row] != before[row]).any()])
"""


def test_rows_of_a_batch_are_computed_on_in_memory_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
