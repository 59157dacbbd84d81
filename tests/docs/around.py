"""What stands before and after the parts of programs in the documentation, so that they run."""

TORCH = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
local_rank = int(os.environ["LOCAL_RANK"])
"""
END = """
dist.destroy_process_group()
"""
SIMULATED = """
from tests.torch.accelerator import load
load()  # in the place of GPUs
torch.nn.Module.cuda = lambda self: self.to(f"simdev:{local_rank}")
model = torch.nn.Linear(3, 1)
"""
TRAIN_ON_DEVICE = """
images = torch.ones(2, 3, device=f"simdev:{local_rank}") * (1 + local_rank)
model(images).sum().backward()
assert model.module.weight.grad.tolist() == [[3.0] * 3]
"""
WIRE = """
assert dist.group.WORLD._group._config.wire_dtype == "int8"
"""
PLAIN = """
model = torch.nn.Linear(3, 1)
loader = [(torch.ones(2, 3), torch.ones(2, 1))] * 31
loss_of = torch.nn.functional.mse_loss
"""
BEGUN = """
dist.init_process_group("smddp")
model = torch.nn.Linear(1024, 1024)
"""
CHECK_FORWARD = """
assert "forward" in model.module.__dict__
"""
ALONE = """
dist.init_process_group("smddp")
os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each rank had a node of its own
from sdp_plugins.torch import LocalUpdates
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
SAVED = """
import tempfile
local, rank, folder = LocalUpdates(model, optimizer), dist.get_rank(), tempfile.mkdtemp()
optimizer.step()
"""
CONTINUED = """
assert local.steps == 1
local.close()
"""
TRACED = """
dist.init_process_group("smddp")
def train_one_step():
    dist.all_reduce(torch.ones(3))
"""
CHECK_TRACE = """
from pathlib import Path
assert len(list(Path("trace").iterdir())) >= 1
"""
LIGHTNING = """
import os
import lightning as L, torch
os.environ["PL_TRAINER_MAX_EPOCHS"] = "1"

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 3), batch_size=2)

model = Model()
"""
TRAINED = """
assert trainer.world_size == 4 and trainer.global_step == 2
assert type(trainer.strategy).__name__.startswith("SMDDP")
"""
HUGGINGFACE = """
import torch
from transformers import BertConfig, BertForSequenceClassification
size = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_attention_heads=1)
model = BertForSequenceClassification(BertConfig(**size, num_hidden_layers=1))
data = [{"input_ids": torch.arange(4) + i % 4, "labels": i % 2} for i in range(16)]
"""
KERAS_ALONE = """
import keras, numpy as np
x, y = np.ones((16, 3)), np.ones((16, 1))
"""
BUILT = """
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
KERAS = (
    KERAS_ALONE
    + """
from sdp_plugins.keras import SMDDPStrategy
strategy = SMDDPStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
"""
)
TENSORFLOW = """
import tensorflow as tf
x = tf.ones((4, 3))

def parts():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build((None, 3))
    return model, tf.keras.optimizers.SGD(0.1), tf.keras.metrics.Mean()
"""
DISTRIBUTED_DATA = """
GLOBAL_BATCH = 4
dataset = tf.data.Dataset.from_tensor_slices((tf.ones((8, 3)),))
step = lambda rows: tf.reduce_sum(0 * model(rows) + 1)
"""

IN_TWO_RANKS = {
    "model.cuda()": (TORCH + SIMULATED, TRAIN_ON_DEVICE + END),
    'dist.init_process_group("smddp")  #': (TORCH, 'assert dist.get_backend() == "smddp"' + END),
    "write_into_buckets(model)": (TORCH + PLAIN + BEGUN, CHECK_FORWARD + END),
    "pg_options=Options(": (TORCH, WIRE + END),
    "# this rank's data; the loop": (TORCH + PLAIN, "assert local.steps == 31" + END),
    "dist.new_subgroups(": (
        TORCH + PLAIN + ALONE,
        "assert dist.get_world_size(inner) == 1" + END,
    ),
    "# In the run that continues": (TORCH + PLAIN + ALONE + SAVED, CONTINUED + END),
    "trace.start(": (TORCH + TRACED, CHECK_TRACE + END),
    "TrainingArguments(": (HUGGINGFACE, 'assert torch.distributed.get_backend() == "smddp"'),
    "SMDDPMonitor(strategy)": (
        KERAS,
        'assert "smddp/waiting_share" in model.history.history',
    ),
    "SMDDPLocalUpdates(every=30, wire": (
        KERAS_ALONE + BUILT,
        "assert local.group.world_size == 2",
    ),
    "SMDDPStrategy(groups[node])": (KERAS_ALONE, "assert strategy.num_replicas_in_sync == 2"),
    "sdp.DistributedGradientTape": (
        TENSORFLOW + "model, optimizer, _ = parts()\n",
        "assert len(gradients) == 2",
    ),
    "experimental_distribute_dataset": (
        TENSORFLOW + DISTRIBUTED_DATA,
        "assert loss == 4",
    ),
}
"""Started by sdp run: what stands in the part, and what stands before and after it."""
IN_ONE_PROCESS = {
    "trainer.fit(model)": (LIGHTNING, TRAINED),
    "SMDDPStrategy(static_graph": (LIGHTNING, "trainer.fit(model)" + TRAINED),
    '"smddp_sharded"': (LIGHTNING, "trainer.fit(model)" + TRAINED),
    "SMDDPLocalStrategy(": (LIGHTNING, "trainer.fit(model)" + TRAINED),
    "SMDDPMonitor()": (LIGHTNING, "trainer.fit(model)" + TRAINED),
}
"""They start ranks themselves."""
FILLED_IN = {
    "\nL.Trainer(": "\ntrainer = L.Trainer(",
    "loss = ...": "loss = tf.reduce_mean(model(x))",
    "model, optimizer, metric = ...": "model, optimizer, metric = parts()",
    "/tmp/trace": "trace",
    "num_nodes=2, ": "",
    "keras.callbacks.TensorBoard()": "keras.callbacks.CSVLogger('log.csv')",  # a large package
}
ELSEWHERE = {
    "dist._get_reconfigure_handle()": "tests/torch/test_reconfigure.py",
    "from sdp_plugins.sagemaker import PyTorch": "tests/sagemaker/test_estimator.py",
    "from sagemaker.pytorch import PyTorch": "tests/integration/sagemaker/sdk2.py",
    "from sagemaker.train import ModelTrainer": "tests/integration/sagemaker/sdk3.py",
}
"""Parts that need newer versions, AWS or its packages, and who runs their like."""
