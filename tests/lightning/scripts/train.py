"""A user's script that knows nothing of us: python train.py PACKAGE STRATEGY,... [RANK WAY]

With RANK and WAY that rank fails. WAY is when ("step", "early" or "launched") and how ("raises",
"killed", "terminated" by a SIGTERM to it alone, or "waits": until it has got a SIGTERM, or its
standard input has ended).
"""

import importlib
import os
import select
import signal
import sys
import time

import torch
from torch import nn

package, strategies = sys.argv[1:3]
failing, way = [*sys.argv[3:], "", ""][:2]
L = importlib.import_module(package)


def fail(trainer, where):
    if str(trainer.global_rank) != failing or not way.startswith(where):
        return
    print(f"failed at {time.monotonic()}", flush=True)
    if way.endswith("waits"):
        while not trainer.received_sigterm and not select.select([sys.stdin], [], [], 0.01)[0]:
            pass
    elif way.endswith("terminated"):
        os.kill(os.getpid(), signal.SIGTERM)
    elif way.endswith("raises"):
        raise ArithmeticError("a fault of the script")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def configure_callbacks(self):
        fail(self.trainer, "launched")  # the others run, but have not met yet
        return []

    def training_step(self, batch, index):
        if index == 2:
            fail(self.trainer, "step")
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(strategy):
    torch.manual_seed(1)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fail(trainer, "early")
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2))
    result = model.net.weight.sum().item()
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {result:.6f}", flush=True)


if __name__ == "__main__":
    for strategy in strategies.split(","):
        main(strategy)
