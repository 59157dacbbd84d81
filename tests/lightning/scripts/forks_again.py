"""Cells of a notebook: compute in the main process, then train on forked ranks."""

import torch
from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

model = BoringModel()
big = torch.ones(4_000_000)
assert torch.get_num_threads() > 1
torch.sin(big)  # starts threads of OpenMP, which forked ranks do not have


class Threads(Callback):
    def on_train_start(self, trainer, module):
        torch.sin(big)
        print(f"rank {trainer.global_rank} of 2: {torch.get_num_threads()}", flush=True)


Trainer(
    accelerator="cpu",
    devices=2,
    strategy="smddp_notebook",
    max_steps=2,
    callbacks=[Threads()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(model)
