"""Large gradients of JAX and TensorFlow lie in memory that the ranks map, and are not copied."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from typing import Any

import keras
import numpy as np

from sdp_plugins.core import Group
from sdp_plugins.core.shared_malloc import LARGE_NBYTES
from sdp_plugins.keras import SMDDPStrategy
from tests.keras.first_ranks import on_ranks

LARGE = LARGE_NBYTES // 4
SHARING = ("tensorflow", "jax")


def reduced(group: Group, arrays: list[np.ndarray[Any, Any]]) -> list[Any]:
    """The sums of arrays, as tensors that the backend makes in a compiled function."""
    if keras.backend.backend() == "jax":
        import jax

        from sdp_plugins.jax.collectives import JaxCollectives

        of_jax, turn = JaxCollectives(group), jax.numpy.zeros(())
        return list(
            jax.jit(lambda *all: of_jax.all_reduce([2 * a for a in all], "sum", turn)[0])(*arrays)
        )
    import tensorflow as tf

    from sdp_plugins.tensorflow.collectives import TensorFlowCollectives

    of_tensorflow = TensorFlowCollectives(group)
    return list(
        tf.function(lambda *all: of_tensorflow.all_reduce([2 * a for a in all], "sum"))(*arrays)
    )


@on_ranks(2, SHARING)
def test_large_tensors_are_reduced_together_where_they_lie(rank: int, world: int) -> None:
    for count, path in ((LARGE - 1, "staged"), (LARGE, "zero-copy")):
        counts = (LARGE // 2, count, count + 1 if path == "zero-copy" else 9)
        arrays = [np.arange(n, dtype=np.float32) + rank for n in counts]
        with Group.from_env(timeout_s=100) as group:
            for _ in range(3):
                sums = [np.asarray(total) for total in reduced(group, arrays)]
                assert group.last_path == path
                for n, total in zip(counts, sums, strict=True):
                    assert (total == 4 * np.arange(n) + 2).all()


def trained() -> str:
    """A digest of the weights after some steps with a large and a small layer."""
    keras.utils.set_random_seed(1)
    with closing(SMDDPStrategy()) as strategy, strategy.scope():
        model = keras.Sequential(
            [keras.Input((1024,)), keras.layers.Dense(1100, "relu"), keras.layers.Dense(4)]
        )
        model.compile("adam", "mse")
        x = np.random.default_rng(0).random((24, 1024), np.float32)
        model.fit(x, x[:, :4], batch_size=6, epochs=2, verbose=0, shuffle=False)
        return hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()


@on_ranks(2, SHARING)
def test_weights_have_the_bits_that_they_have_with_copies(rank: int, world: int) -> str:
    found = trained()
    os.environ["SDP_REGISTER"] = "0"
    try:
        assert trained() == found
    finally:
        del os.environ["SDP_REGISTER"]
    return found
