"""Trace a few steps of Keras, to see what goes on beside the backward pass.

KERAS_BACKEND=jax SDP_FUSION_MB=4 sdp run -n 2 --trace /tmp/keras examples/trace_keras.py
python -m benchmarks.overlap /tmp/keras
"""

import time

import keras
import numpy as np

from sdp_plugins import trace
from sdp_plugins.keras import SMDDPStrategy

WIDTH, LAYERS, ROWS, STEPS = 1024, 8, 256, 12


class Steps(keras.callbacks.Callback):
    """Draws each step."""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """See Keras."""
        self._begin_ns = time.monotonic_ns()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """See Keras."""
        if keras.backend.backend() == "jax":  # which goes on before a step has ended
            import jax

            jax.block_until_ready(logs)
        name = "step" if batch > 2 else "warm-up"
        trace.add_span(name, self._begin_ns, time.monotonic_ns())


def main() -> None:
    """In every rank."""
    strategy = SMDDPStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).random((ROWS * STEPS, WIDTH), np.float32)
    model.fit(x, x, batch_size=ROWS, epochs=1, verbose=0, callbacks=[Steps()])
    strategy.close()


if __name__ == "__main__":
    main()
