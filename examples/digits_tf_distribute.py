"""A custom TensorFlow loop, by a ``tf.distribute`` strategy: digits on all ranks.

    sdp run -n 2 examples/digits_tf_distribute.py

The digits are scikit-learn's: 1797 digits of 8 x 8 pixels. With MultiWorkerMirroredStrategy only
the line that makes the strategy would differ.
"""

from __future__ import annotations

import tensorflow as tf
from sklearn.datasets import load_digits

from sdp_plugins.tensorflow import SMDDPStrategy

EPOCHS, GLOBAL_BATCH = 5, 64

strategy = SMDDPStrategy()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500]))
train = train.shuffle(1500, seed=7).batch(GLOBAL_BATCH)  # a seed: all ranks read the same batches
train = strategy.experimental_distribute_dataset(train)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(64, "relu"),
            tf.keras.layers.BatchNormalization(synchronized=True),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    optimizer = tf.keras.optimizers.Adam(5e-3)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """One rank's part of a step; the optimizer sums gradients over the ranks."""
    with tf.GradientTape() as tape:
        scores = model(images, training=True)
        loss = tf.nn.compute_average_loss(loss_of(labels, scores), global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    accuracy.update_state(labels, scores)
    return loss


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """One step of all ranks."""
    return strategy.reduce("SUM", strategy.run(step, args=(images, labels)), axis=None)


for epoch in range(EPOCHS):
    for images, labels in train:
        loss = train_step(images, labels)
    seen = float(accuracy.result())  # of all ranks, which all have to ask for it
    accuracy.reset_state()
    if strategy.rank == 0:
        right = tf.argmax(model(x[1500:]), axis=1) == y[1500:]
        print(
            f"epoch {epoch + 1}: loss {loss:.3f}, training accuracy {seen:.3f}, "
            f"test accuracy {right.numpy().mean():.3f}"
        )
