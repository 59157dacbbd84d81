"""A custom TensorFlow loop, with SMDDP's names: digits on all ranks.

    sdp run -n 2 examples/digits_tensorflow.py

The digits are scikit-learn's: 1797 digits of 8 x 8 pixels. Every rank takes every n-th of them.
"""

from __future__ import annotations

import tensorflow as tf
from sklearn.datasets import load_digits

import smdistributed.dataparallel.tensorflow as sdp

EPOCHS, BATCH = 5, 32

sdp.init()
tf.keras.utils.set_random_seed(sdp.rank())
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500]))
data = data.shard(sdp.size(), sdp.rank()).shuffle(1500).batch(BATCH, drop_remainder=True)

model = tf.keras.Sequential(
    [tf.keras.Input((64,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(2e-3)
optimizer.build(model.trainable_variables)


@tf.function
def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """One step; returns the loss of all ranks."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = sdp.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return sdp.oob_allreduce(loss)


sdp.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
for epoch in range(EPOCHS):
    for images, labels in data:
        loss = step(images, labels)
    if sdp.rank() == 0:
        right = tf.argmax(model(x[1500:]), axis=1) == y[1500:]
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {right.numpy().mean():.3f}")
sdp.shutdown()
