"""One rank: trains on the digits, and tells the parent of every step that it commits."""

from __future__ import annotations

import hashlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from sdp_plugins.core import SdpError
from sdp_plugins.torch.elastic.training import Elastic

BATCH, SEED = 16, 1
TRAINED = 1500  # of 1797 digits; the others are held out
SLOW_S = 0.2


class Committed(NamedTuple):
    """A step that a rank has committed.

    Attributes:
        at: When, on the monotonic clock.
        number: The rank's number in the job.
        view: Counts the groups that this rank has been in.
        step: The step.
        epoch: Its epoch.
        first: Number of samples of the epoch that had been used before it.
        counts: Samples of each rank.
        numbers: The ranks' numbers.
        loss: This rank's.
        digest: Of the weights after it.
    """

    at: float
    number: int
    view: int
    step: int
    epoch: int
    first: int
    counts: tuple[int, ...]
    numbers: tuple[int, ...]
    loss: float
    digest: str


class Setting(NamedTuple):
    """How to train.

    Attributes:
        timeout_s: Of operations.
        epochs: Number of epochs.
        batch: Samples of each rank in a step.
        slow: While this file exists, a step takes SLOW_S longer.
    """

    timeout_s: float
    epochs: int
    batch: int = BATCH
    slow: str = ""


def digits(held_out: bool = False) -> TensorDataset:
    """The digits, in float64: then a replay can be compared closely."""
    data = load_digits()
    part = slice(TRAINED, None) if held_out else slice(TRAINED)
    return TensorDataset(torch.tensor(data.data[part] / 16.0), torch.tensor(data.target[part]))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def digest_of(model: nn.Module) -> str:
    """A digest of the weights' bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def accuracy_of(model: nn.Module) -> float:
    """The share of the held-out digits that it knows."""
    x, y = digits(held_out=True).tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def main(number: int, environment: dict[str, str], setting: Setting, parent: Connection) -> None:
    """Run one rank until the training ends."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    model, optimizer = made()
    parent.send(("asks", number, time.monotonic()))
    try:
        elastic = Elastic(model, optimizer, timeout_s=setting.timeout_s)
        train(elastic, model, optimizer, setting, parent)
    except SdpError as error:
        parent.send(("left", number, f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error
    parent.send(("ended", number, accuracy_of(model)))


def train(
    elastic: Elastic, model: nn.Module, optimizer: Any, setting: Setting, parent: Connection
) -> None:
    """Train, and tell of every step."""
    loader = elastic.loader(digits(), setting.batch, seed=SEED)
    for _ in elastic.epochs(setting.epochs):
        for x, y in loader:
            before, view = elastic.progress, elastic.view
            counts, numbers = tuple(elastic._counts), tuple(elastic.numbers)
            with elastic.step() as step:
                if os.path.exists(setting.slow):
                    time.sleep(SLOW_S)
                loss = functional.cross_entropy(elastic.model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                digest = digest_of(model)
                mine = elastic.numbers[elastic.rank]
            if not step.discarded:
                at = time.monotonic()
                parent.send(
                    Committed(at, mine, view, *before, counts, numbers, loss.item(), digest)
                )
    elastic.close()
