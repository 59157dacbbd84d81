"""Keras' `fit` in a strategy's scope."""

import os

import keras
from sklearn.datasets import load_digits

from sdp_plugins.keras import SMDDPStrategy

strategy = SMDDPStrategy()
keras.utils.set_random_seed(0)
pixels, digits = load_digits(return_X_y=True)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
history = model.fit(pixels / 16, digits, batch_size=64, epochs=20, verbose=0)
if strategy.rank == 0:
    accuracy = history.history["accuracy"][-1]
    print(f"ranks={strategy.num_replicas_in_sync}; accuracy={accuracy:.4f};", flush=True)
    model.save(os.path.join(os.environ["SM_MODEL_DIR"], "model.keras"))
