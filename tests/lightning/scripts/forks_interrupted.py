"""A cell of a notebook that trains on forked ranks; a front end interrupts the kernel alone."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from lightning import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

begun = Path("begun")


class Begins(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1:
            begun.touch()


def interrupt():
    while not begun.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt, daemon=True).start()
try:
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="smddp_notebook",
        max_epochs=-1,
        callbacks=[Begins()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(BoringModel())
except SystemExit:
    print("left:", multiprocessing.active_children(), flush=True)
