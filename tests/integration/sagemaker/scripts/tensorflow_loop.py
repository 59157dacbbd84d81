"""A script in the pattern of those for SMDDP with TensorFlow 2: a loop of its own."""

import argparse
import os

import tensorflow as tf
from sklearn.datasets import load_digits

import smdistributed.dataparallel.tensorflow as sdp

parser = argparse.ArgumentParser()
parser.add_argument("--model_dir", help="SageMaker gives it")
arguments = parser.parse_args()

sdp.init()
tf.random.set_seed(sdp.rank())
pixels, digits = load_digits(return_X_y=True)
data = tf.data.Dataset.from_tensor_slices((pixels.astype("float32") / 16, digits))
data = data.shard(sdp.size(), sdp.rank()).batch(64 // sdp.size(), drop_remainder=True)
model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(10)])
loss_of = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.optimizers.Adam(0.01 * sdp.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = sdp.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        sdp.broadcast_variables(model.variables, root_rank=0)
        sdp.broadcast_variables(optimizer.variables, root_rank=0)
    return sdp.oob_allreduce(loss)


for batch, (images, labels) in enumerate(data.repeat(5)):
    loss = training_step(images, labels, batch == 0)
if sdp.rank() == 0:
    print(f"ranks={sdp.size()}; loss={loss:.4f}; model_dir={arguments.model_dir}", flush=True)
    model.save(os.path.join(os.environ["SM_MODEL_DIR"], "model.keras"))
