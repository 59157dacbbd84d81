"""Handwritten digits with Lightning on two workers, over gloo and over smddp.

    python examples/digits_lightning.py                    # both, and a table
    python examples/digits_lightning.py --strategy smddp   # one run

It is plain Lightning: the only trace of smddp is the name of the strategy, and there is nothing to
import for it.
"""

import argparse
import os
import sys

# Two workers share this machine: one thread for each, unless the user has said otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from compare_strategies import compare
from lightning import LightningModule, Trainer, seed_everything
from measuring import StepTimes, report
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

BATCH_SIZE = 32
EPOCHS = 8


class DigitsNet(LightningModule):
    """A small convolutional net: 6.6 million parameters, 26 MB of gradients, two DDP buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 2048),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(2048, 1152),
            nn.ReLU(),
            nn.Linear(1152, 10),
        )

    def training_step(self, batch, batch_index):
        """The loss of this worker's batch; the gradients are averaged over the workers."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_index):
        """The share of images that are recognised, over all workers."""
        images, labels = batch
        hits = (self.net(images).argmax(dim=1) == labels).float()
        self.log("accuracy", hits.mean(), sync_dist=True)

    def configure_optimizers(self):
        """Stochastic gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def digits():
    """1437 images of 8 x 8 pixels for training and 360 for the test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    everything = TensorDataset(images, torch.tensor(labels))
    return random_split(everything, [1437, 360], torch.Generator().manual_seed(0))


def train(strategy: str, results: str | None) -> None:
    """Train and test with one strategy; Lightning starts the second worker."""
    seed_everything(1)
    train_set, test_set = digits()
    model, times = DigitsNet(), StepTimes()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True)
    trainer.fit(model, loader)
    [test] = trainer.test(model, DataLoader(test_set, BATCH_SIZE))

    batch = next(iter(loader))
    report(results, trainer, model.net, batch, times, test["accuracy"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", help="train once, with this strategy of Lightning")
    parser.add_argument("--results", help="file to write the measurements to, as JSON")
    options = parser.parse_args()
    if options.strategy:
        train(options.strategy, options.results)
    elif "RANK" in os.environ:
        sys.exit("The comparison starts its own workers: run it with python, or add --strategy.")
    else:
        sys.exit(compare(__file__, {"ddp": "gloo", "smddp": "smddp"}))
